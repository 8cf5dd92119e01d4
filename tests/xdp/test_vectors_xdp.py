# SPDX-License-Identifier: Apache-2.0
"""The XDP program by BPF_PROG_TEST_RUN: the vectors' sequences, and random ones against the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import replay
from tests.drawn import between, one_of
from tests.model import Config
from tests.vectors import encode
from tests.vectors.scenario import NETWORK, ROUND, VIEW, mac
from tests.vectors.scenarios.summing import SWITCH
from tests.xdp.target import XdpTarget

pytestmark = pytest.mark.xdp

BLOCKS = 4
MEMBERS = 3
MACS = [bytes.fromhex(mac(number).replace(":", "")) for number in range(1, MEMBERS + 1)]


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(BLOCKS)
    yield target
    target.close()


@pytest.mark.parametrize("path", replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences(path: Path, program: XdpTarget) -> None:
    sequence = replay.load(path)
    program.begin(sequence["config"], replay.member_macs(sequence), replay.view_key(sequence))
    replay.replay(sequence, program)


HEADER = {
    "network": NETWORK,
    "flags": 0,
    "tag": 0,
}
#: What may be wrong with a frame: field of the header -> values.
WRONG_HEADER: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("version", (0, 2)),
    ("type", (0, 5, 12, 14)),
    ("network", (0, NETWORK + 1)),
    ("view", (VIEW - 1, VIEW + 1)),
    ("round", (0, ROUND - 1, ROUND + 2, 2**32 - 1)),
    ("sender", (0, 1, 4, 65, 65535)),
    ("length", (0, 31, 55, 1487, 65535)),
    ("flags", (1, 2, 3, 4, 8, 16, 0x8000)),
    ("tag", (2**64 - 1,)),
)
#: The same of the body.
WRONG: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "fragment": (
        ("index", (16, 31, 32, 2**31, 2**32 - 1)),
        ("fragments", (0, 1, 2**32 - 1)),
        ("lanes", (0, 65535)),
        ("width", (1, 24, 64, 255)),
        ("shift", (1, 27, 43, 51, 63, 64, 255)),
    ),
    "token": (
        ("generation", (3, 5)),
        ("hop", (0, 2, 1000)),
        ("owner", (0, 3, 4, 65535)),
        ("state", (1, 2)),
        ("members", (0, 2, 4, 255)),
        ("idle", (1, 2, 65535)),
        ("ranges", (1, 3)),
        ("sent", (1, 2, 3)),
        ("stripe", (1,)),
        ("listed", (1,)),
        ("settled", (1,)),
    ),
    "ack": (("number", (7,)),),
}
WIDTHS = {32: (26, 16), 16: (42, 8), 8: (50, 4), 0: (0, 32)}


@st.composite
def fragments(draw: st.DrawFn) -> tuple[dict[str, int], bytes]:
    """Fields and payload of a sound fragment."""
    width = draw(one_of(32, 32, 16, 8, 0))
    most, places = WIDTHS[width]
    index = draw(one_of(0, 0, 0, 1, 1, places - 1))
    fields = {
        "index": index,
        "fragments": draw(one_of(max(2, index + 1), 2**32 - 1)),
        "lanes": 1440 * 8 // (width or 8),
        "width": width,
        "shift": draw(one_of(0, most, most // 2)),
        "samples": 32,
    }
    # Real payloads are dense, but drawing 1440 bytes each time takes too long: repeat a few.
    piece = draw(st.binary(min_size=8, max_size=24))
    return fields, (piece * (1440 // len(piece) + 1))[:1440]


@st.composite
def frames(
    draw: st.DrawFn, hop: int, view: int, round_: int, sequence: int, view_key: bytes, sums: bool
) -> bytes:
    """One frame of a member, sound in two draws of three; else something is wrong with it."""
    name = draw(one_of(*["fragment"] * 6, *["token"] * 5, "ack"))
    header = HEADER | {
        "view": view,
        "sender": draw(one_of(2, 3)),
        "round": round_ + draw(one_of(0, 0, 0, 1, -2)),
        "sequence": max(0, sequence - draw(one_of(0, 0, 0, 0, 1, 5, 1023, 1024))),
    }
    fields: dict[str, int] = {"number": 1}
    tail = b""
    if name == "fragment":
        fields, tail = draw(fragments())
    elif name == "token":
        fields = {"generation": 4, "hop": hop, "owner": draw(one_of(1, 1, 2))}
        fields |= {"members": MEMBERS, "unit": draw(between(-128, 127))}
        fields |= {"sent": draw(between(0, 2)), "idle": draw(one_of(0, 0, 1, 2))}
        fields["state"] = draw(one_of(*[0] * 6, 1))
        header["flags"] = draw(one_of(0, 0, 0, 0, 1, 2, 4))
        fields["ranges"] = draw(one_of(*[0] * 6, 1))
        tail = bytes(MEMBERS * 20 + fields["ranges"] * 8)
    source, ethertype, cut, padding = mac(header["sender"]), encode.ETHERTYPE, 0, 0
    if name == "fragment" and draw(one_of(*[sums] * 9, not sums)):
        header |= {"sender": 0, "flags": encode.ADD}
        fields["shift"] = 0 if draw(between(0, 9)) else fields["shift"]
        source = SWITCH
    fault = draw(one_of(*["none"] * 10, "header", "header", "body", "body", "frame"))
    if fault == "header":
        key, values = draw(one_of(*WRONG_HEADER))
        header[key] = draw(one_of(*values))
    elif fault == "body":
        key, values = draw(one_of(*WRONG[name]))
        fields[key] = draw(one_of(*values))
        if key == "ranges" and draw(st.booleans()):
            tail = bytes(MEMBERS * 20 + fields[key] * 8)
    elif fault == "frame":
        source = draw(one_of(mac(1), mac(2), mac(3), mac(9), SWITCH))
        ethertype = draw(one_of(*[encode.ETHERTYPE] * 4, 0x0800))
        cut = draw(one_of(0, 1, 5, 20, 60, 1400))
        padding = draw(one_of(0, 1, 60))
    data = encode.frame(header, (name, fields), tail=tail)
    if view_key and len(data) <= 1500 and draw(one_of(*[True] * 9, False)):
        data = encode.sign(data, view_key)
    whole = encode.ethernet(source, data, ethertype)
    return whole[: max(14, len(whole) - cut)] + bytes(padding)


@st.composite
def changes(draw: st.DrawFn, now: Config) -> dict[str, Any]:
    """What an agent does between two frames: a new view, the next round, a pause, its own part."""
    kind = draw(one_of("view", "round", "round", "bank", "part", "part", "other"))
    if kind == "view":
        return {"view": now.view + 1}
    if kind in ("round", "bank"):
        round_ = now.round + (1 if kind == "round" else 2)
        low = draw(one_of(round_, round_, round_ - 2))  # of the same bank: too old there
        return {"round": round_, "round_low": low, "round_high": round_ + 1, "own_sent": 0}
    if kind == "part":
        return {"own_sent": draw(between(0, 2)), "sent_seen": draw(between(0, 2))}
    name = draw(one_of("enabled", "bounce", "alive", "sums", "sums_next"))
    return {name: type(getattr(now, name))(not getattr(now, name))}


CONFIG = {
    "enabled": 1,
    "network": NETWORK,
    "view": VIEW,
    "round_low": ROUND,
    "round_high": ROUND + 1,
    "number": 1,
    "members": MEMBERS,
    "live": MEMBERS,
    "next": 2,
    "bounce": 1,
    "round": ROUND,
    "sent_seen": 0,
    "own_sent": 0,
    "blocks": BLOCKS,
    "keyed": 0,
    "sums": 0,
    "sums_next": 0,
    "alive": True,
}


@pytest.mark.short("keyed")
@pytest.mark.parametrize("key", [b"", bytes(range(16))], ids=["open", "keyed"])
@settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_sequences_as_the_model(program: XdpTarget, data: st.DataObject, key: bytes) -> None:
    sums = int(data.draw(between(0, 3)) == 0)
    config = CONFIG | {"keyed": int(bool(key)), "sums": sums}
    model = replay.ModelTarget(config, MACS, key)
    now = model.model.config
    program.begin(config, MACS, key)
    sent: list[bytes] = []
    hop = sequence = 1
    for _ in range(data.draw(between(5, 40))):
        action = data.draw(one_of(*["frame"] * 14, *["repeat"] * 3, *["agent"] * 3))
        if action == "agent":
            change = data.draw(changes(now))
            model.configure(change)
            program.configure(change)
            continue
        repeated = action == "repeat" and sent
        fresh = frames(hop, now.view, now.round, sequence, key, bool(now.sums))
        frame = data.draw(st.sampled_from(sent) if repeated else fresh)
        sent.append(frame)
        hop += data.draw(one_of(1, 1, 2))
        sequence += data.draw(one_of(1, 1, 1, 1, 700))
        expected = model.run(frame)
        assert program.run(frame) == expected, frame[:120].hex()
    replay.compare(program.state(), model.state())
