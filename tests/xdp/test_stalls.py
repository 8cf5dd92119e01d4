# SPDX-License-Identifier: Apache-2.0
"""A processor stalls in the middle of a frame, and goes on after others: each interleaving by itself."""

from __future__ import annotations

import base64
import itertools
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nicps import wire
from nicps.dataplane import bpf, images, loader
from nicps.dataplane.maps import Maps
from tests.xdp import stall
from tests.xdp.kernel import MACS, NETWORK, VIEW, fragment, kernel, lanes, payload_of, token
from tests.xdp.stall import Stalling, stalling

#: What a later frame may belong to, as (view, round); the older one is of round 1. Both are in one bank.
LATER = {"round": (VIEW, 3), "view": (VIEW + 1, 1)}
HOUR_NS = 3_600_000_000_000


@pytest.fixture(scope="module")
def program() -> Iterator[Stalling]:
    with stalling() as loaded:
        yield loaded


def piece(seed: int, sender: int, index: int = 0, view: int = VIEW, round_: int = 1) -> bytes:
    """One of two fragments of a contribution."""
    payload = payload_of(lanes(32, seed), 32)
    return fragment(
        payload, width=32, sender=sender, index=index, fragments=2, view=view, round_=round_
    )


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("sender", [2, 0], ids=["members", "switch"])
def test_an_older_fragment_is_not_stored_over_a_newer_one(
    program: Stalling, later: str, sender: int
) -> None:
    """Its round was open when it was checked."""
    view, round_ = LATER[later]
    other = 3 if sender else 0

    def prepare() -> None:
        program.reset()
        program.maps.config["sums"] = program.maps.config["sums_next"] = int(not sender)

    def meanwhile() -> None:
        program.maps.config["view"] = view
        program.kernel.run(piece(11, other, view=view, round_=round_))

    met = program.meet(stall.CHECKED, piece(10, sender), prepare, meanwhile)
    assert met.run.verdict == bpf.XDP_DROP
    assert met.counters == {"added": 1, "round": 1}
    sums = program.maps.accumulators[1].reshape(-1, 360)
    assert (sums[0] == lanes(32, 11)).all()
    assert program.maps.missing(round_, view, other, 2, 9) == [(1, 1)]
    assert program.maps.count(1, VIEW, sender) == 0
    if sender:
        program.kernel.run(piece(12, sender, view=view, round_=round_))
        assert (sums[0] == lanes(32, 11) + lanes(32, 12)).all()


@pytest.mark.parametrize("later", LATER)
def test_an_older_fragment_does_not_open_a_count_again(program: Stalling, later: str) -> None:
    """Its slot is free, but its sender has sent others since."""
    view, round_ = LATER[later]

    def meanwhile() -> None:
        program.maps.config["view"] = view
        program.kernel.run(piece(11, 2, view=view, round_=round_))

    met = program.meet(stall.CHECKED, piece(10, 2, index=1), program.reset, meanwhile)
    assert met.counters == {"added": 1, "round": 1}
    assert program.maps.count(round_, view, 2) == 1
    last = program.kernel.run(piece(12, 2, index=1, view=view, round_=round_))
    assert last.verdict == bpf.XDP_PASS, "it wakes the agent"
    assert program.maps.count(round_, view, 2) == 2


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("sender", [2, 0], ids=["members", "switch"])
def test_a_fragment_counts_for_its_own_round(program: Stalling, later: str, sender: int) -> None:
    """It is in the sum when its processor stalls, and its sender's next contribution begins."""
    view, round_ = LATER[later]
    newer = piece(11, sender, index=0, view=view, round_=round_)

    def prepare() -> None:
        program.reset()
        program.maps.config["sums"] = program.maps.config["sums_next"] = int(not sender)

    def meanwhile() -> tuple[dict[str, int], int]:
        program.maps.config["view"] = view
        before = program.maps.counters()
        program.kernel.run(newer)
        program.kernel.run(piece(12, 3, index=1, view=view, round_=round_))
        after = program.maps.counters()
        risen = {name: after[name] - n for name, n in before.items() if after[name] != n}
        return risen, program.maps.count(round_, view, 3)

    met = program.meet(stall.ADDED, piece(10, sender), prepare, meanwhile)
    risen, others = met.meanwhile
    program.kernel.run(newer)
    assert program.maps.count(round_, view, sender) == 1
    assert program.maps.missing(round_, view, sender, 2, 9) == [(1, 1)]
    assert program.maps.count(1, VIEW, sender) == 0
    if sender:
        assert risen == {"busy": 1, "added": 1}, "only this sender's count is held"
        assert others == 1


def bouncing(maps: Maps) -> None:
    """The agent lets the kernel hand tokens on."""
    maps.config["bounce"] = 1
    maps.config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS


def test_one_processor_bounces_at_a_time(program: Stalling) -> None:
    """The copy is of the newest token, and whole; while it is written, the agent does not wait for it."""

    def prepare() -> None:
        program.reset()
        bouncing(program.maps)

    def meanwhile() -> tuple[bytes | None, int]:
        return program.maps.bounced(), program.kernel.run(token(1, 9, 1, idle=1)).verdict

    met = program.meet(stall.BOUNCED, token(1, 5, 1), prepare, meanwhile)
    assert met.run.verdict == bpf.XDP_TX
    assert met.meanwhile == (None, bpf.XDP_PASS), "the agent has the other token"
    assert program.maps.bounced() == met.run.frame[wire.ETHERNET_BYTES :]
    assert int(program.maps.ring["bounced"]) == 1 << 32 | 6
    assert int(program.maps.ring["seen"]) == 1 << 32 | 9
    newest = program.kernel.run(token(1, 12, 1))
    assert newest.verdict == bpf.XDP_TX
    assert program.maps.bounced() == newest.frame[wire.ETHERNET_BYTES :]


def test_a_new_view_waits_for_a_stalled_processor() -> None:
    """Also before the first accumulators: a token of the old view would be the newest one of the new view."""
    stall.need_two_processors()
    loaded = loader.load(str(stall.SOURCE), {"nicps_xdp": "xdp"})
    try:
        maps, run = Maps(loaded.maps), loaded.programs["nicps_xdp"]
        words = stall.words_of(loaded.maps)
        deadline, waited = time.monotonic() + stall.LIMIT_S, 0
        for view in itertools.count(VIEW):
            assert time.monotonic() < deadline, f"stalled {waited} times"
            maps.enter_view(view, 1, MACS, 2)
            maps.config["network"], maps.config["round"], maps.config["enabled"] = NETWORK, 1, 1
            bouncing(maps)
            words["reached"], words["late"], words["place"] = 0, 0, stall.BOUNCED
            frame = token(1, 5, 1, view=view)
            other = threading.Thread(target=bpf.prog_test_run, args=(run, frame))
            other.start()
            while not words["reached"]:
                assert time.monotonic() < deadline
            stalled = not words["late"]
            maps.enter_view(view + 1, 1, MACS, 2)
            other.join(stall.LIMIT_S)
            assert (int(maps.ring["bounced"]), int(maps.ring["seen"])) == (0, 0)
            waited += stalled
            if waited == 3:
                return
    finally:
        loaded.close()


def test_what_the_agent_sends_never_makes_a_token_new_again() -> None:
    """The kernel takes a newer token between any two lines of `Maps.saw`; its repeat is no new one."""
    code, lines = Maps.saw.__code__, 0
    with kernel() as loaded:

        def run_at(line: int) -> bool:
            loaded.reset()
            left = line

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal left
                if frame.f_code is not code:
                    return None
                if event == "line":
                    left -= 1
                    if left == 0:
                        assert loaded.run(token(2, 1, 1)).verdict == bpf.XDP_PASS
                return trace

            sys.settrace(trace)
            try:
                loaded.maps.saw(1, 5)
            finally:
                sys.settrace(None)
            assert loaded.run(token(1, 5, 1)).verdict == bpf.XDP_DROP
            if left <= 0:
                assert loaded.run(token(2, 1, 1)).verdict == bpf.XDP_DROP, f"line {line}"
            return left <= 0

        while run_at(lines + 1):
            lines += 1
        assert lines > 1


BPF_ATOMIC_64 = 0xDB  # BPF_STX | BPF_ATOMIC | BPF_DW
#: Operations, which are where other instructions have a number. Those with BPF_FETCH return the old value.
BPF_FETCH = 1
ADD, EXCHANGE, COMPARE = BPF_FETCH, 0xE0 | BPF_FETCH, 0xF0 | BPF_FETCH
#: What orders, each in a program of its own, on a word of a map; and the operations that must be in it.
ORDERING = {
    "claim": ("nicps_claim(&slot->claim);", [COMPARE]),
    "release": ("nicps_release(&slot->claim);", [EXCHANGE]),
    "publish": ("nicps_publish(&slot->tag, slot->seen);", [EXCHANGE]),
    "enter": ("return nicps_enter(progress, slot->tag);", [ADD, EXCHANGE, COMPARE]),
    "leave": ("return nicps_leave(progress);", [ADD]),
    "begin_saving": ("if (nicps_begin_saving(saved)) saved->length = 0;", [COMPARE]),
    "end_saving": ("nicps_end_saving(saved);", [EXCHANGE]),
}
PROGRAM = """
int %s(struct xdp_md *ctx)
{
	struct nicps_progress *progress = nicps_progress(0, 1);
	struct nicps_saved *saved = nicps_saved();
	struct nicps_slot *slot = nicps_slot(0);

	if (!progress || !saved || !slot)
		return XDP_DROP;
	%s
	return XDP_DROP;
}
"""


def test_what_orders_is_a_full_barrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler has made operations of it that return the old value: others order nothing on arm64.

    With the others `nicps_enter` changes the count between those that order.
    """
    monkeypatch.setattr(images, "FOLDER", tmp_path / "images")
    source = tmp_path / "ordering.c"
    programs = [PROGRAM % (name, code) for name, (code, _) in ORDERING.items()]
    source.write_text('#include "nicps.c"\n' + "".join(programs))
    loader.load(str(source), dict.fromkeys(ORDERING, "xdp")).close()
    (image,) = (tmp_path / "images").iterdir()
    made = json.loads(image.read_bytes())["programs"]
    for name, (_, ordering) in ORDERING.items():
        instructions = struct.iter_unpack("=BBhi", base64.b64decode(made[name]))
        operations = [value for code, _, _, value in instructions if code == BPF_ATOMIC_64]
        undone = [value for value in operations if not value & BPF_FETCH]
        assert sorted(value for value in operations if value & BPF_FETCH) == ordering, name
        assert set(undone) == ({0} if name == "enter" else set()), name
