# SPDX-License-Identifier: Apache-2.0
"""The key of a Linux switch: a grant is worth something for one frame from one address, and nothing without the key."""

from __future__ import annotations

import base64
from hashlib import blake2b
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from nicps import extras, switchauth, wire
from nicps.errors import EnvironmentProblem, WireError
from nicps.switchauth import SwitchKey, Unsealed

pytestmark = pytest.mark.unit
SECRET = bytes(range(32))
KEY = SwitchKey.of(SECRET)
SOURCE = bytes.fromhex("020000000001")
GRANT = wire.Grant(b"s" * 16, b"k" * 16, b"h1", 1)
MEMBERS = (wire.GrantMember(SOURCE, 1), wire.GrantMember(bytes.fromhex("020000000002"), 2))
BODY_AT, TAIL_AT = 32, 72


def grant() -> bytes:
    header = wire.Header(type=wire.FrameType.SWITCH, network=0xCAFE, view=3, sender=1, sequence=9)
    body = wire.Switch(5, 6, 0, 3, 100, 16, wire.SwitchStep.GRANT)
    return wire.Frame(header, body, (), wire.pack_grant(GRANT, MEMBERS)).pack()


def test_what_is_sealed_is_opened() -> None:
    sealed = KEY.seal(grant(), SOURCE)
    assert KEY.open(sealed, SOURCE) == grant()
    assert wire.unpack(sealed).header.length == len(sealed) == len(grant()) + 28
    assert GRANT.siphash not in sealed and MEMBERS[1].mac not in sealed
    assert KEY.open(sealed + bytes(20), SOURCE) == grant()


def test_the_seal_is_what_the_page_says() -> None:
    """Key, associated data and place of nonce and tag, put together by hand."""
    sealed = KEY.seal(grant(), SOURCE)
    key = blake2b(key=SECRET, digest_size=32, person=b"nicps switch aea").digest()
    bound = bytearray(sealed[:TAIL_AT])
    bound[18:20], bound[24:32] = bytes(2), bytes(8)
    tail = sealed[TAIL_AT:]
    plain = ChaCha20Poly1305(key).decrypt(tail[:12], tail[12:], SOURCE + bytes(bound))
    assert plain == grant()[TAIL_AT:]


def test_no_nonce_serves_twice() -> None:
    assert KEY.seal(grant(), SOURCE)[TAIL_AT:][:12] != KEY.seal(grant(), SOURCE)[TAIL_AT:][:12]


def test_every_bit_counts() -> None:
    """But for `length`, which must fit, and `tag`, which a grant does not have."""
    sealed = KEY.seal(grant(), SOURCE)
    for bit in range(8 * len(sealed)):
        at = bit // 8
        broken = bytearray(sealed)
        broken[at] ^= 1 << bit % 8
        if 24 <= at < 32:
            assert KEY.open(bytes(broken), SOURCE)[TAIL_AT:] == grant()[TAIL_AT:]
            continue
        with pytest.raises((Unsealed, WireError)):
            KEY.open(bytes(broken), SOURCE)


def test_another_address_or_another_key_opens_nothing() -> None:
    sealed = KEY.seal(grant(), SOURCE)
    with pytest.raises(Unsealed, match="02:00:00:00:00:02 was sealed under another key"):
        KEY.open(sealed, MEMBERS[1].mac)
    with pytest.raises(Unsealed):
        SwitchKey.of(bytes(32)).open(sealed, SOURCE)
    short = bytearray(sealed[: TAIL_AT + 8])
    short[18:20] = len(short).to_bytes(2, "big")
    with pytest.raises(Unsealed, match="8 bytes"):
        KEY.open(bytes(short), SOURCE)


def test_tags_are_under_a_key_of_their_own() -> None:
    """Who used one file for both would not make the network's tags those of the switch."""
    frame = grant()
    assert KEY.control.verify(KEY.control.sign(frame, SOURCE), SOURCE)
    network = switchauth.NetworkKey(SECRET)
    assert not KEY.control.verify(network.sign(frame, SOURCE), SOURCE)


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "switch.key"
    file.write_bytes(base64.b64encode(SECRET))
    file.chmod(0o600)
    assert SwitchKey.read(file) == KEY
    assert SECRET.hex() not in repr(KEY) and "_sealing" not in repr(KEY)
    file.chmod(0o644)
    with pytest.raises(EnvironmentProblem, match="chmod 600"):
        SwitchKey.read(file)


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"cryptography is not .*'nicps\[crypto\]'"):
        SwitchKey.read(tmp_path / "any")
