# SPDX-License-Identifier: Apache-2.0
"""Keys and tags, against hashes that are put together here by hand."""

from __future__ import annotations

import base64
import os
import struct
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nicps import wire
from nicps.auth import NetworkKey, Sequences, view_key, write_key
from nicps.errors import EnvironmentProblem, UsageProblem

SECRET = bytes(range(32))
KEY = NetworkKey(SECRET)
SOURCE = bytes.fromhex("020000000001")
PADDING = b"\0" * 14

#: A header by hand: version, type, flags, network, view, round, sender, length, sequence, tag; then 11 bytes.
HEAD = struct.pack(">BBHIIIHHI", 1, 1, 0, 0xCAFE, 7, 9, 2, 32 + 4 + 11, 77)
FRAME = HEAD + bytes(8) + b"body" + b"hello world"


def expected(secret: bytes, source: bytes, frame: bytes) -> bytes:
    """Keyed BLAKE2b over the sender's address and the frame, with eight zeros in the tag's place (24 to 32)."""
    text = source + frame[:24] + bytes(8) + frame[32:]
    return blake2b(text, digest_size=8, key=secret, person=b"nicps control").digest()


def test_the_header_by_hand_is_the_wires() -> None:
    header = wire.unpack_header(FRAME)
    assert (header.sequence, header.view, header.length, header.tag) == (77, 7, len(FRAME), 0)


def test_a_tag_is_the_hash_of_address_and_frame() -> None:
    signed = KEY.sign(FRAME, SOURCE)
    assert signed[24:32] == expected(SECRET, SOURCE, FRAME)
    # Once and for all: hosts of different versions must understand each other.
    assert signed[24:32].hex() == "463705dd96a327c4"
    assert signed[:24] + signed[32:] == FRAME[:24] + FRAME[32:]


def test_what_the_tag_held_before_does_not_matter() -> None:
    assert KEY.sign(HEAD + b"\xff" * 8 + FRAME[32:], SOURCE) == KEY.sign(FRAME, SOURCE)


def test_bytes_and_bytearrays_alike_and_nothing_is_changed() -> None:
    frame = bytearray(FRAME)
    assert KEY.sign(frame, SOURCE) == KEY.sign(FRAME, SOURCE)
    assert frame == FRAME
    assert KEY.verify(bytearray(KEY.sign(FRAME, SOURCE)), SOURCE)


def test_padding_of_a_short_ethernet_frame_is_let_pass() -> None:
    assert KEY.verify(KEY.sign(FRAME, SOURCE) + PADDING, SOURCE)


@given(st.binary(max_size=200), st.data())
def test_one_bit_anywhere(tail: bytes, data: st.DataObject) -> None:
    frame = struct.pack(">BBHIIIHHI", 1, 1, 0, 0xCAFE, 7, 9, 2, 32 + len(tail), 77)
    signed = KEY.sign(frame + bytes(8) + tail, SOURCE)
    assert KEY.verify(signed, SOURCE)
    bit = data.draw(st.integers(0, 8 * len(signed) - 1))
    broken = bytearray(signed)
    broken[bit // 8] ^= 1 << bit % 8
    assert not KEY.verify(broken, SOURCE)


def test_every_bit_of_one_frame_and_of_its_address() -> None:
    signed = KEY.sign(FRAME, SOURCE)
    whole = SOURCE + signed
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        assert not KEY.verify(broken[6:] + PADDING, bytes(broken[:6])), bit


@given(st.integers(0, len(FRAME) - 1))
def test_cut_off(length: int) -> None:
    assert not KEY.verify(KEY.sign(FRAME, SOURCE)[:length], SOURCE)


@given(st.binary(max_size=100))
def test_anything_else(frame: bytes) -> None:
    assert not KEY.verify(frame, SOURCE)


@given(st.integers(0, 255))
def test_another_key(bit: int) -> None:
    other = bytearray(SECRET)
    other[bit // 8] ^= 1 << bit % 8
    assert not NetworkKey(bytes(other)).verify(KEY.sign(FRAME, SOURCE), SOURCE)


def test_keys_of_a_view_by_hand() -> None:
    seed = b"all the members' nonces"
    place = b"\0\0\0\x07" + seed
    made = view_key(KEY, 7, seed)
    assert made.siphash == blake2b(place, digest_size=16, key=SECRET, person=b"nicps view sip").digest()  # fmt: skip
    secret = blake2b(place, digest_size=32, key=SECRET, person=b"nicps view ctl").digest()
    assert made.secret == secret
    assert made.sign(FRAME, SOURCE)[24:32] == expected(secret, SOURCE, FRAME)
    assert made.verify(made.sign(FRAME, SOURCE), SOURCE)


def test_each_view_seed_and_network_has_its_own() -> None:
    made = [
        KEY,
        view_key(KEY, 7, b"seed"),
        view_key(KEY, 8, b"seed"),
        view_key(KEY, 7, b"seeds"),
        view_key(NetworkKey(SECRET[::-1]), 7, b"seed"),
    ]
    for one in made:
        verdicts = [other.verify(one.sign(FRAME, SOURCE), SOURCE) for other in made]
        assert verdicts == [other is one for other in made]
    siphash = {key.siphash for key in made[1:4]} | {key.secret[:16] for key in made}
    assert len(siphash) == 3 + len(made)


def test_a_key_does_not_show_itself() -> None:
    shown = repr(KEY) + repr(view_key(KEY, 1, b""))
    assert repr(SECRET) not in shown and "secret" not in shown and "siphash" not in shown


# ---- replays


def test_sequence_numbers_only_rise() -> None:
    seen = Sequences()
    other = bytes.fromhex("020000000002")
    taken = [seen.accept(SOURCE, number) for number in (0, 0, 1, 5, 4, 5, 6, 0xFFFFFFFF, 0)]
    assert taken == [True, False, True, True, False, False, True, False, False]
    assert seen.accept(other, 3) and not seen.accept(other, 3)


@given(st.integers(0, 0xFFFFFFFF), st.lists(st.integers(0, Sequences.NUMBERS), min_size=1))
def test_no_number_is_taken_twice(first: int, steps: list[int]) -> None:
    """Wherever a sender's numbers stand when the key comes into force, also across 2^32."""
    seen = Sequences()
    assert seen.accept(SOURCE, first)
    numbers = [(first + step) % (1 << 32) for step in steps]
    taken = [
        step for step, number in zip(steps, numbers, strict=True) if seen.accept(SOURCE, number)
    ]
    assert taken == sorted(set(taken) - {0})
    assert not any(seen.accept(SOURCE, number) for number in (first, *numbers))


# ---- key files


def key_file(folder: Path, text: bytes = base64.b64encode(SECRET) + b"\n", mode: int = 0o600) -> Path:  # fmt: skip
    path = folder / "key"
    path.write_bytes(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_key_is_read(tmp_path: Path, mode: int) -> None:
    assert NetworkKey.read(key_file(tmp_path, mode=mode)).secret == SECRET


def test_a_key_of_64_bytes_is_read(tmp_path: Path) -> None:
    assert NetworkKey.read(key_file(tmp_path, base64.b64encode(SECRET * 2))).secret == SECRET * 2


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o644, 0o660, 0o666])
def test_a_key_that_others_can_read_or_change(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(EnvironmentProblem, match=f"mode 0{mode:o}.*`chmod 600 {path}`"):
        NetworkKey.read(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"a secret",
        base64.b64encode(SECRET[:31]),
        base64.b64encode(SECRET * 2 + b"x"),
        base64.b64encode(SECRET)[:-1],
        base64.b64encode(SECRET) + b"\n" + base64.b64encode(SECRET),
        base64.b64encode(SECRET).replace(b"A", b"!"),
        b"\xff" * 44,
        b"A" * 5000,
    ],
)
def test_what_is_no_key(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(EnvironmentProblem, match="holds no key") as error:
        NetworkKey.read(key_file(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"No such file.*nicps key new"):
        NetworkKey.read(tmp_path / "key")


def test_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(EnvironmentProblem, match="no regular file"):
            NetworkKey.read(path)
    for folder in (tmp_path, Path("")):
        with pytest.raises(EnvironmentProblem, match="is a directory: name a file") as error:
            NetworkKey.read(folder)
        assert str(folder / "NAME.key") in str(error.value) and "key new" not in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_that_is_somebody_elses(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.chown(path, 65534, -1)
    with pytest.raises(EnvironmentProblem, match=f"belongs to user 65534.*`chown root {path}`"):
        NetworkKey.read(path)


def test_a_fresh_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_key(tmp_path / "one")
    finally:
        os.umask(before)
    write_key(tmp_path / "two")
    assert (tmp_path / "one").stat().st_mode & 0o7777 == 0o600
    secrets = {NetworkKey.read(tmp_path / name).secret for name in ("one", "two")}
    assert [len(secret) for secret in secrets] == [32, 32]
    text = (tmp_path / "one").read_bytes()
    assert text.endswith(b"\n") and text.count(b"\n") == 1


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    with pytest.raises(UsageProblem, match="is there already"):
        write_key(path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageProblem, match="is there already"):
        write_key(tmp_path / "link")
    assert NetworkKey.read(path).secret == SECRET
    assert not (tmp_path / "nowhere").exists()
