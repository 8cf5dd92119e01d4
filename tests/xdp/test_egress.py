# SPDX-License-Identifier: Apache-2.0
"""The program that signs what this host sends, by BPF_PROG_TEST_RUN, against a library's SipHash."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from siphash24 import siphash24

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps
from nicps.layout import layout
from tests.vectors import encode
from tests.xdp.kernel import MACS, NETWORK, VIEW

KEY = bytes(range(16))
MARK = layout().limits["MARK"]
GO_ON, SHOT = 2**32 - 1, 2  # TC_ACT_UNSPEC, TC_ACT_SHOT
LAST = 2**32 - 1
HOUR_NS = 3_600_000_000_000


class Egress:
    """Both programs, as member 1 of 3 with a key; `blocks` 1."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self.xdp, self.egress = (loaded.programs[name] for name in ("nicps_xdp", "nicps_egress"))
        self.maps = Maps(loaded.maps)
        self.outgoing = np.frombuffer(bpf.map_memory(loaded.maps["outgoing"]), np.uint64, 1)
        maps = loaded.maps["windows"], loaded.maps["token_windows"]
        self.windows = [np.frombuffer(bpf.map_memory(fd), np.uint8) for fd in maps]
        self.reset(KEY)

    def reset(self, key: bytes | None) -> None:
        """A new view."""
        self.maps.enter_view(VIEW, 1, MACS[:3], 2, key)
        self.maps.config["network"] = NETWORK

    def send(self, frame: bytes, mark: int = MARK) -> bpf.Run:
        """A frame of this host, from its version byte on."""
        return bpf.prog_test_run(self.egress, wire.ethernet(MACS[0], frame), mark=mark)


@pytest.fixture(scope="module")
def programs() -> Iterator[Egress]:
    loaded = loader.load("nicps.c", {"nicps_xdp": "xdp", "nicps_egress": "sched_cls"})
    yield Egress(loaded)
    loaded.close()


def fragment(payload: bytes, sender: int = 1, sequence: int = 77) -> bytes:
    header = wire.Header(network=NETWORK, view=VIEW, round=1, sender=sender, sequence=sequence)
    return wire.pack(header, wire.Fragment(0, 1, 1440, 8, 0, 1), tail=payload)


def token(members: int, ranges: int = 0, owner: int = 1, sender: int = 1) -> bytes:
    header = wire.Header(network=NETWORK, view=VIEW, round=1, sender=sender, sequence=77)
    entries = [wire.Entry(number, 3, 4, 5, 6, 1, 9) for number in range(members)]
    missing = [wire.Range(number, 1, 2) for number in range(ranges)]
    body = wire.Token(1, 1, owner, 0, members, 0, ranges, 0, 0, 0)
    return wire.pack(header, body, entries, missing)


def signed(frame: bytes, sequence: int, key: bytes = KEY) -> bytes:
    """What the program must make of it."""
    return encode.sign(frame[:20] + sequence.to_bytes(4, "big") + frame[24:], key)


def test_the_papers_vector() -> None:
    """Appendix A of "SipHash: a fast short-input PRF": what the library and `encode.sign` mean is the same."""
    digest = siphash24(bytes(range(15)), key=bytes(range(16))).digest()
    assert int.from_bytes(digest, "little") == 0xA129CA6149BE45E5


def test_as_the_library(programs: Egress) -> None:
    rng = np.random.default_rng(2)
    frames = [fragment(rng.bytes(1440)) for _ in range(20)]
    frames += [token(members, members % 5) for members in range(1, 65)]
    frames += [token(64, wire.max_ranges(64)), token(63, wire.max_ranges(63))]
    for key in (KEY, rng.bytes(16), bytes(16), b"\xff" * 16):
        programs.reset(key)
        for number, frame in enumerate(frames, 1):
            run = programs.send(frame)
            assert run.verdict == GO_ON
            assert run.frame[14:] == signed(frame, number, key), f"frame {number}"
        assert programs.maps.sequence == len(frames)


def test_padding_is_not_signed(programs: Egress) -> None:
    programs.reset(KEY)
    frame = token(1)
    assert programs.send(frame + b"\xaa" * 9).frame[14:] == signed(frame, 1) + b"\xaa" * 9


def test_what_is_left_alone(programs: Egress) -> None:
    programs.reset(KEY)
    ours = fragment(bytes(1440))
    assert programs.send(ours, mark=0).frame[14:] == ours, "another socket's"
    assert programs.send(ours, mark=MARK + 1).frame[14:] == ours
    control = wire.pack(wire.Header(network=NETWORK, view=VIEW, sender=1), wire.Fail(), tail=b"why")
    assert programs.send(control).frame[14:] == control
    other = encode.ethernet(MACS[0].hex(":"), ours, 0x0800)
    assert bpf.prog_test_run(programs.egress, other, mark=MARK).frame == other
    assert programs.send(ours[:20]).frame[14:] == ours[:20]
    assert programs.maps.sequence == 0
    programs.reset(None)
    assert programs.send(ours).frame[14:] == ours, "a trusted LAN"
    assert programs.maps.sequence == 0


def test_one_counter_for_both_programs(programs: Egress) -> None:
    programs.reset(KEY)
    programs.send(fragment(bytes(1440)))
    config = programs.maps.config
    config["enabled"] = config["bounce"] = config["round"] = config["round_high"] = 1
    config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS
    incoming = wire.ethernet(MACS[2], encode.sign(token(3, sender=3), KEY))
    run = bpf.prog_test_run(programs.xdp, incoming)
    assert run.verdict == bpf.XDP_TX, programs.maps.counters()
    bounced = wire.unpack_header(run.frame[14:])
    assert bounced.sequence == programs.maps.sequence == 2
    assert run.frame[14:] == encode.sign(run.frame[14:], KEY)
    assert programs.maps.bounced() == run.frame[14:]
    assert wire.unpack_header(programs.send(token(3)).frame[14:]).sequence == 3


def test_numbers_used_up(programs: Egress) -> None:
    """At the last number the view is over: no more frames are signed, and the agent can see it coming."""
    programs.reset(KEY)
    programs.outgoing[0] = LAST - 1
    config = programs.maps.config
    config["enabled"] = config["bounce"] = config["round"] = config["round_high"] = 1
    config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS
    frame = fragment(bytes(1440))
    assert programs.send(frame).frame[14:] == signed(frame, LAST)
    assert programs.maps.sequence == LAST
    before = programs.maps.counters()
    for _ in range(3):
        assert programs.send(frame).verdict == SHOT
    incoming = wire.ethernet(MACS[2], encode.sign(token(3, sender=3), KEY))
    assert bpf.prog_test_run(programs.xdp, incoming).verdict == bpf.XDP_PASS, "the agent's"
    after = programs.maps.counters()
    assert after["spent"] == before["spent"] + 3
    assert after["raised"] == before["raised"] + 1
    programs.reset(bytes(16))
    assert programs.send(frame).verdict == GO_ON
    assert programs.maps.sequence == 1


def test_a_new_view_starts_again(programs: Egress) -> None:
    """Windows, numbers and key: nothing of the old view is left."""
    programs.reset(KEY)
    programs.maps.allocate(1)

    def take(frame: bytes) -> dict[str, int]:
        before = programs.maps.counters()
        bpf.prog_test_run(programs.xdp, wire.ethernet(MACS[1], frame))
        return {n: c - before[n] for n, c in programs.maps.counters().items() if c != before[n]}

    for key, wrong in ((KEY, bytes(16)), (bytes(16), KEY)):
        programs.reset(key)
        config = programs.maps.config
        config["round_high"] = config["enabled"] = 1
        frame = fragment(bytes(1440), sender=2, sequence=1)
        late = fragment(bytes(1440), sender=2, sequence=5000)
        assert take(encode.sign(frame, wrong)) == {"forged": 1}
        assert set(take(encode.sign(late, key))) & {"added", "duplicate"}
        assert take(encode.sign(frame, key)) == {"replayed": 1}
    with pytest.raises(ValueError, match="a view's key has 16 bytes, not 15"):
        programs.maps.set_key(bytes(15))


def test_a_hundred_thousand_of_each(programs: Egress) -> None:
    """Forged and replayed frames of all kinds: every one is counted, and not a byte of state moves."""
    programs.reset(KEY)
    programs.maps.allocate(1)
    config = programs.maps.config
    config["round_high"] = config["round"] = config["enabled"] = 1

    def give(frame: bytes, times: int = 1) -> int:
        return bpf.prog_test_run(programs.xdp, wire.ethernet(MACS[1], frame), times).verdict

    def numbered(frame: bytes, number: int, flags: int = 0) -> bytes:
        head = frame[:2] + flags.to_bytes(2, "big") + frame[4:20] + number.to_bytes(4, "big")
        return encode.sign(head + frame[24:], KEY)

    added, passed = fragment(b"\1" * 1440, sender=2), token(3, sender=2, owner=3)
    near = [numbered(added, 2000), numbered(passed, 2001), numbered(passed, 2002, wire.Flag.REPEAT)]
    far = [numbered(added, 1), numbered(passed, 2), numbered(passed, 3, wire.Flag.REPEAT)]
    high = [numbered(frame, 9000)[:24] + bytes(8) + frame[32:] for frame in (added, passed)]
    for frame in near:
        give(frame)

    def state() -> list[bytes]:
        maps = programs.maps
        views = (maps.ring, maps.accumulators, *programs.windows, programs.outgoing)
        return [view.tobytes() for view in views]

    before, counted = state(), programs.maps.counters()
    for frame in near + far + high:
        assert give(frame, 100_000) == bpf.XDP_DROP
    assert state() == before
    after = programs.maps.counters()
    assert {n: c - counted[n] for n, c in after.items() if c != counted[n]} == {
        "duplicate": 100_000,
        "stale": 100_000,
        "replayed": 400_000,
        "forged": 200_000,
    }
