# SPDX-License-Identifier: Apache-2.0
"""A processor stalls in the middle of a frame, and goes on after others: each interleaving by itself."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.dataplane import bpf, images, loader
from tests.xdp import stall
from tests.xdp.kernel import VIEW, fragment, lanes, payload_of
from tests.xdp.stall import Stalling, stalling

#: What a later frame may belong to, as (view, round); the older one is of round 1. Both are in one bank.
LATER = {"round": (VIEW, 3), "view": (VIEW + 1, 1)}


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


#: What orders, each in a program of its own, on a word of a map.
ORDERING = {
    "claim": "nicps_claim(&slot->claim);",
    "release": "nicps_release(&slot->claim);",
    "publish": "nicps_publish(&slot->tag, slot->seen);",
    "leave": "return nicps_leave(progress);",
}
PROGRAM = """
int %s(struct xdp_md *ctx)
{
	struct nicps_progress *progress = nicps_progress(0, 1);
	struct nicps_slot *slot = nicps_slot(0);

	if (!progress || !slot)
		return XDP_DROP;
	%s
	return XDP_DROP;
}
"""
BPF_ATOMIC_64 = 0xDB  # BPF_STX | BPF_ATOMIC | BPF_DW
BPF_FETCH = 1  # in the operation, which is where other instructions have a number


def test_what_orders_is_a_full_barrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler has made operations of it that return the old value: others order nothing on arm64."""
    monkeypatch.setattr(images, "FOLDER", tmp_path / "images")
    source = tmp_path / "ordering.c"
    programs = [PROGRAM % both for both in ORDERING.items()]
    source.write_text('#include "nicps.c"\n' + "".join(programs))
    loader.load(str(source), dict.fromkeys(ORDERING, "xdp")).close()
    (image,) = (tmp_path / "images").iterdir()
    made = json.loads(image.read_bytes())["programs"]
    for name in ORDERING:
        instructions = struct.iter_unpack("=BBhi", base64.b64decode(made[name]))
        operations = [value for code, _, _, value in instructions if code == BPF_ATOMIC_64]
        assert len(operations) == 1, name
        assert operations[0] & BPF_FETCH, name
