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
from tests.vectors import encode
from tests.vectors.scenario import NETWORK, ROUND, VIEW, mac
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
    program.begin(sequence["config"], replay.member_macs(sequence))
    replay.replay(sequence, program)


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The usual value in most draws: a frame with every field wrong shows nothing."""
    return st.sampled_from([usual] * 12 + [*others])


HEADERS = {
    "version": mostly(1, 0, 2),
    "network": mostly(NETWORK, 0, NETWORK + 1),
    "view": mostly(VIEW, VIEW - 1, VIEW + 1),
    "round": st.sampled_from([ROUND] * 6 + [ROUND + 1] * 4 + [ROUND - 1, ROUND + 2]),
    "sender": st.sampled_from([2] * 6 + [3] * 6 + [0, 1, 4, 65, 65535]),
    "flags": mostly(0, 1, 2, 3, 4, 8, 16, 0x8000),
    "sequence": st.integers(0, 2**32 - 1),
    "tag": mostly(0, 2**64 - 1),
}


@st.composite
def fragments(draw: st.DrawFn) -> tuple[str, dict[str, Any], bytes]:
    width = draw(st.sampled_from([32, 32, 16, 8, 0, 24]))
    most = {32: 26, 16: 42, 8: 50}.get(width, 0)
    fields = {
        "index": draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 2**32 - 1])),
        "fragments": draw(st.sampled_from([2, 2, 1, 3, 32, 33, 0, 2**32 - 1])),
        "lanes": draw(st.integers(0, 2**16 - 1)),
        "width": width,
        "shift": draw(st.sampled_from([0, 0, 1, most, most, most + 1, 63, 64, 255])),
        "samples": draw(st.integers(0, 2**32 - 1)),
    }
    # Real payloads are dense, but drawing 1440 bytes each time takes too long: repeat a few.
    piece = draw(st.binary(min_size=8, max_size=24))
    payload = (piece * (1440 // len(piece) + 1))[:1440]
    return "fragment", fields, payload


@st.composite
def tokens(draw: st.DrawFn) -> tuple[str, dict[str, Any], bytes]:
    ranges = draw(mostly(0, 1, 3))
    fields = {
        "generation": draw(st.sampled_from([4, 4, 4, 4, 5, 3])),
        "hop": draw(st.integers(0, 40)),
        "owner": draw(st.sampled_from([1] * 5 + [2] * 3 + [0, 4])),
        "state": draw(mostly(0, 1, 2)),
        "members": draw(mostly(MEMBERS, 0, 2, 4, 255)),
        "idle": draw(st.sampled_from([0, 0, 0, 1, 2, 3, 65535])),
        "ranges": draw(mostly(ranges, ranges + 1)),
        "sent": draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        "unit": draw(st.integers(-128, 127)),
        "stripe": draw(st.integers(0, 3)),
    }
    return "token", fields, bytes(draw(mostly(MEMBERS, 2, 4)) * 20 + ranges * 8)


BODIES = st.one_of(
    fragments(),
    fragments(),
    tokens(),
    tokens(),
    st.sampled_from([("ack", {"number": 1}, b""), ("want", {}, b""), ("call", {}, b"h9")]),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One frame; usually of a member, well formed, in view and round."""
    name, fields, tail = draw(BODIES)
    header = {key: draw(values) for key, values in HEADERS.items()}
    header |= draw(
        mostly({}, {"length": 0}, {"length": 31}, {"length": 1487}, {"type": 0}, {"type": 10})
    )
    data = encode.frame(header, (name, fields), tail=tail)
    source = draw(mostly(header["sender"], 1, 2, 3, 9)) & 0xFF
    whole = encode.ethernet(mac(source), data, draw(mostly(encode.ETHERTYPE, 0x0800)))
    cut = draw(st.sampled_from([0] * 15 + [1, 5, 20, 1400]))
    return whole[: max(14, len(whole) - cut)] + bytes(draw(mostly(0, 1, 60)))


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "enabled": mostly(1, 0),
        "view": mostly(VIEW, VIEW + 1),
        "round": st.sampled_from([ROUND, ROUND, ROUND + 1]),
        "round_low": st.sampled_from([ROUND - 1, ROUND, ROUND + 1]),
        "round_high": st.sampled_from([ROUND, ROUND + 1, ROUND + 2]),
        "bounce": mostly(1, 0),
        "sent_seen": st.integers(0, 3),
        "own_sent": st.integers(0, 2),
        "alive": mostly(True, False),
    },
)
CONFIG = {
    "enabled": 1,
    "network": NETWORK,
    "view": VIEW,
    "round_low": ROUND,
    "round_high": ROUND + 1,
    "number": 1,
    "members": MEMBERS,
    "bounce": 1,
    "round": ROUND,
    "sent_seen": 0,
    "own_sent": 0,
    "fragments": 2,
    "blocks": BLOCKS,
    "alive": True,
}


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_random_sequences_as_the_model(program: XdpTarget, data: st.DataObject) -> None:
    model = replay.ModelTarget(CONFIG, MACS)
    program.begin(CONFIG, MACS)
    sent: list[bytes] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["frame"] * 8 + ["repeat"] * 3 + ["agent"]))
        if action == "agent":
            changes = data.draw(CHANGES)
            model.configure(changes)
            program.configure(changes)
            continue
        repeated = action == "repeat" and sent
        frame = data.draw(st.sampled_from(sent) if repeated else frames())
        sent.append(frame)
        expected = model.run(frame)
        assert program.run(frame) == expected, frame[:120].hex()
    replay.compare(program.state(), model.state())
