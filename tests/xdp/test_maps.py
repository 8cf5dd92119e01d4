# SPDX-License-Identifier: Apache-2.0
"""The maps as the agent reads and writes them: views, counts, missing ranges, the token's position."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nicps import wire
from nicps.dataplane import bpf
from nicps.errors import EnvironmentProblem
from nicps.layout import layout
from tests.xdp.kernel import MACS, NETWORK, VIEW, Kernel, fragment, kernel, token

HOUR_NS = 3_600_000_000_000


@pytest.fixture(scope="module")
def loaded() -> Iterator[Kernel]:
    with kernel() as program:
        yield program


def runs(missing: set[int]) -> list[tuple[int, int]]:
    """Ranges of a set of numbers, the slow way."""
    out: list[tuple[int, int]] = []
    for number in sorted(missing):
        if out and sum(out[-1]) == number:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((number, 1))
    return out


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lost=st.sets(st.integers(0, 39)),
    fragments=st.integers(1, 40),
    sender=st.integers(2, 64),
    limit=st.integers(1, 8),
)
def test_missing(loaded: Kernel, lost: set[int], fragments: int, sender: int, limit: int) -> None:
    loaded.reset(blocks=5)
    other = 2 if sender != 2 else 3
    for index in range(fragments):
        # The other sender's bits, and an older round's, must not count.
        loaded.run(fragment(bytes(1440), width=0, index=index, fragments=fragments, sender=other))
        if index not in lost:
            loaded.run(
                fragment(bytes(1440), width=0, index=index, fragments=fragments, sender=sender)
            )
    expected = runs({index for index in lost if index < fragments})
    assert loaded.maps.missing(1, VIEW, sender, fragments, limit) == expected[:limit]
    assert loaded.maps.count(1, VIEW, sender) == fragments - sum(n for _, n in expected)
    assert loaded.maps.count(1, VIEW, other) == fragments
    assert loaded.maps.count(1, VIEW, 0) == 2 * fragments - sum(n for _, n in expected)
    assert loaded.maps.missing(3, VIEW, sender, fragments, limit) == [(0, fragments)]
    assert loaded.maps.count(3, VIEW, sender) == loaded.maps.count(1, VIEW + 1, sender) == 0


def test_allocate_is_exact_and_starts_again(loaded: Kernel) -> None:
    loaded.reset(blocks=2)
    loaded.run(fragment(b"\1" * 1440, width=8))
    old, old_fd = loaded.maps.accumulators, loaded.maps.accumulators_fd
    assert old[1, 0, 0] == 1
    loaded.maps.allocate(3)
    assert loaded.maps.accumulators.shape == (2, 3, 1440)
    assert loaded.maps.config["blocks"] == 3
    assert loaded.maps.config["enabled"] == 1
    assert bpf.map_info(loaded.maps.accumulators_fd).entries == 6
    assert not loaded.maps.accumulators.any()
    assert loaded.maps.count(1, VIEW, 2) == 0
    assert loaded.run(fragment(b"\2" * 1440, width=8)).verdict == bpf.XDP_DROP
    assert loaded.maps.accumulators[1, 0, 0] == 2
    assert old[1, 0, 0] == 1, "who has the old ones mapped keeps them"
    assert loaded.maps.accumulators_fd != old_fd or bpf.map_info(old_fd).entries == 6


def test_the_accumulators_of_another_process(loaded: Kernel) -> None:
    """The trainer maps the descriptor that it is given, and sees sums without a system call."""
    loaded.reset(blocks=2)
    theirs_fd = os.dup(loaded.maps.accumulators_fd)
    theirs = np.frombuffer(bpf.map_memory(theirs_fd, writable=False), np.int64)
    with pytest.raises(OSError):
        bpf.map_memory(theirs_fd)  # only the program writes to it
    loaded.run(fragment(b"\xff" * 1440, width=8, shift=3, index=1))
    assert (theirs[2 * 1440 + 1440 : 2 * 1440 + 2880] == -8).all()
    assert theirs.sum() == -8 * 1440


def test_too_much_memory(loaded: Kernel) -> None:
    loaded.reset()
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(EnvironmentProblem, match=r"cannot allocate \d+ MB of accumulators"):
        loaded.maps.allocate(100_000_000)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert loaded.maps.blocks == 2
    assert loaded.run(fragment(bytes(1440), width=8)).verdict == bpf.XDP_DROP
    assert loaded.maps.count(1, VIEW, 2) == 1


def test_enter_view(loaded: Kernel) -> None:
    loaded.reset()
    loaded.maps.saw(9, 9)
    loaded.maps.enter_view(VIEW + 1, 1, [MACS[0], None, MACS[2]], 3)
    config = loaded.maps.config
    assert (config["members"], config["live"], config["next"]) == (3, 2, 3)
    assert (config["view"], config["number"], config["enabled"]) == (VIEW + 1, 1, 0)
    assert int(loaded.maps.ring["seen"]) == 0
    assert config["round_low"] > config["round_high"], "no round is open"
    config["round_high"], config["enabled"] = 9, 1
    for sender, counter in ((3, "added"), (2, "stranger"), (4, "stranger")):
        before = loaded.maps.counters()[counter]
        loaded.run(fragment(bytes(1440), width=8, sender=sender, view=VIEW + 1))
        assert loaded.maps.counters()[counter] == before + 1
    with pytest.raises(ValueError, match="65 members are more than 64"):
        loaded.maps.enter_view(VIEW + 2, 1, [*MACS, MACS[0]], 2)


def control(sender: int, source: bytes) -> bytes:
    """A control frame with that number from that address."""
    header = wire.Header(network=NETWORK, view=VIEW, sender=sender)
    return wire.ethernet(source, wire.pack(header, wire.Fail()))


def share(live: int) -> int:
    """Control frames a second of each member, and of a switch, in a view of so many."""
    return layout().limits["MEMBERS_RATE"] // (live + 1)


def flood(loaded: Kernel, rate: int, *frames: bytes) -> None:
    """20,000 of each of them. No more than `rate` a second go up, and as many at once."""
    before = loaded.maps.counters()
    began = time.monotonic()
    for frame in frames:
        bpf.prog_test_run(loaded.program, frame, 20_000)
    took = time.monotonic() - began
    after = loaded.maps.counters()
    risen = after["control"] - before["control"]
    assert risen + after["limited"] - before["limited"] == 20_000 * len(frames)
    # The coarse clock may be a tick of 10 ms behind.
    assert rate <= risen <= rate * (1.02 + took) + 1


def goes_up(loaded: Kernel, frame: bytes) -> bool:
    """Whether one frame more does."""
    return loaded.run(frame).verdict == bpf.XDP_PASS


def rested(loaded: Kernel, live: int) -> Kernel:
    """A view of the first so many members, in which no control frame has come for a second."""
    loaded.reset()
    loaded.maps.enter_view(VIEW, 1, MACS[:live], 2)
    config = loaded.maps.config
    config["round_low"], config["round_high"], config["enabled"] = 1, 9, 1
    limits = bpf.map_memory(loaded.fds["limits"])
    limits[:] = bytes(len(limits))
    return loaded


@pytest.mark.parametrize("live", [2, 4, 64])
def test_control_frames_are_limited(loaded: Kernel, live: int) -> None:
    """The members' shares together are one rate, so that they do not drown the agent; strangers have another one."""
    rested(loaded, live)
    for frame in (control(2, MACS[1]), control(1, MACS[0]), control(0, wire.SWITCH)):
        flood(loaded, share(live), frame)
    strangers = control(0, b"\2outer"), control(77, MACS[1]), control(2, b"\2outer")
    flood(loaded, layout().limits["OTHERS_RATE"], *strangers)
    assert loaded.run(fragment(bytes(1440), width=8)).verdict == bpf.XDP_DROP
    assert loaded.maps.count(1, VIEW, 2) == 1, "fragments and tokens have no limit"
    deadline = time.monotonic() + 5
    while not goes_up(loaded, control(0, b"\2outer")):
        assert time.monotonic() < deadline, "time makes room again"


@pytest.mark.parametrize("flooding", ["a member", "a stranger", "the switch", "this host's own"])
def test_a_flood_shuts_nobody_else_out(loaded: Kernel, flooding: str) -> None:
    frames = {
        "a member": control(2, MACS[1]),
        "a stranger": control(77, b"\2outer"),
        "the switch": control(0, wire.SWITCH),
        "this host's own": control(1, MACS[0]),
        "another member": control(3, MACS[2]),
        "another stranger": control(0, MACS[20]),
    }
    rested(loaded, 16)
    bpf.prog_test_run(loaded.program, frames.pop(flooding), 20_000)
    if flooding == "a stranger":  # they have one limit together
        del frames["another stranger"]
    rounds = int(share(16)) // 2  # a round's offer and mark
    assert rounds >= 300
    for name, frame in frames.items():
        count = 200 if "stranger" in name else 2 * rounds
        assert all(goes_up(loaded, frame) for _ in range(count)), name


def test_quiesce_returns_soon(loaded: Kernel) -> None:
    loaded.reset()
    began = time.monotonic()
    loaded.maps.quiesce()
    assert time.monotonic() - began < 5


def test_a_bounced_token_byte_by_byte(loaded: Kernel) -> None:
    loaded.reset()
    loaded.maps.config["bounce"] = 1
    loaded.maps.config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS
    before = token(3, 9, 1, idle=4)
    bounces = int(loaded.maps.ring["bounces"])
    run = loaded.run(before)
    assert run.verdict == bpf.XDP_TX
    was, now = wire.unpack(before[14:]), wire.unpack(run.frame[14:])
    changed = {at for at, (a, b) in enumerate(zip(before, run.frame, strict=True)) if a != b}
    source, header, body = range(6, 12), 14, 14 + wire.HEADER_BYTES
    fields = {
        *source,
        *range(header + 2, header + 4),  # flags
        *range(header + 16, header + 18),  # sender
        *range(body + 4, body + 8),  # hop
        *range(body + 8, body + 10),  # owner
        *range(body + 12, body + 14),  # idle
    }
    assert changed <= fields
    assert run.frame[:14] == wire.BROADCAST + MACS[0] + wire.ETHERTYPE.to_bytes(2, "big")
    assert isinstance(now.body, wire.Token)
    assert (now.header.sender, now.header.flags) == (1, wire.Flag.BOUNCED)
    assert (now.body.generation, now.body.hop, now.body.owner, now.body.idle) == (3, 10, 2, 5)
    assert now.items == was.items
    assert loaded.maps.bounced() == run.frame[14:]
    assert int(loaded.maps.ring["seen"]) == int(loaded.maps.ring["bounced"]) == 3 << 32 | 10
    assert int(loaded.maps.ring["bounces"]) == bounces + 1
    assert loaded.run(before).verdict == bpf.XDP_DROP, "the same token once more is stale"


def test_no_bounce_for_a_stopped_agent(loaded: Kernel) -> None:
    loaded.reset()
    loaded.maps.config["bounce"] = 1
    loaded.maps.config["alive_until_ns"] = time.monotonic_ns() - 1
    assert loaded.run(token(1, 1, 1)).verdict == bpf.XDP_PASS


def test_saw(loaded: Kernel) -> None:
    loaded.reset()
    loaded.maps.saw(2, 5)
    assert loaded.run(token(2, 5, 1)).verdict == bpf.XDP_DROP
    loaded.maps.saw(2, 3)
    assert loaded.run(token(2, 5, 1)).verdict == bpf.XDP_DROP
    assert loaded.run(token(2, 6, 1)).verdict == bpf.XDP_PASS


def test_counters_have_the_headers_names(loaded: Kernel) -> None:
    counters = loaded.maps.counters()
    assert list(counters)[:2] == ["added", "bounced"]
    assert {"duplicate", "busy", "stale", "stranger", "truncated"} < set(counters)
    assert loaded.maps.bounced() is None or counters["bounced"]
