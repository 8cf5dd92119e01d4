# SPDX-License-Identifier: Apache-2.0
"""The same gradients summed in three ways: by hosts, by a switch that adds, and by its model.

Members 1 to 3 send fragments, each after a token that is its own. A host, member 4, hears them on a plain LAN and adds;
another one hears what a switch makes of them. What becomes of every frame must be the same, and whatever sum is whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.p4.model import ModelSwitch
from tests.replay import ModelTarget, Target
from tests.vectors import encode

NETWORK, VIEW, ROUND = 0x0A0B0C0D, 3, 7
SENDERS, LISTENER = (1, 2, 3), 4
FRAGMENTS = 4
MACS = [bytes([2, 0, 0, 0, 0, number]) for number in (*SENDERS, LISTENER)]
PORTS = (1, 2, 3)
HEARS = 2  # the port at which the listener is
CONFIG: dict[str, Any] = {
    "enabled": 1,
    "network": NETWORK,
    "view": VIEW,
    "round_low": ROUND,
    "round_high": ROUND,
    "number": LISTENER,
    "members": len(MACS),
    "live": len(MACS),
    "next": 1,
    "bounce": 0,
    "round": ROUND,
    "sent_seen": 0,
    "own_sent": 0,
    "fragments": FRAGMENTS,
    "blocks": FRAGMENTS,
    "keyed": 0,
    "sums": 0,
    "sums_next": 0,
    "alive": True,
}
#: What a switch calls it, and what a host calls the same.
SAME = {"summed": "added", "answered": "duplicate", "window": "range"}
FLAGS_AT = 14 + 2


@dataclass(frozen=True)
class Step:
    """One frame: of which member, at its port, from the Ethernet header on; lanes of `width` bits."""

    sender: int
    frame: bytes
    width: int


def token(owner: int, hop: int) -> bytes:
    """Member `owner` gets the token of a list with all senders in it; it comes from member 1."""
    fields = {"generation": 1, "hop": hop, "owner": owner, "members": len(MACS), "state": 1}
    entries = [("entry", {"samples": 1, "marks": 1})] * len(MACS)
    header = {"network": NETWORK, "view": VIEW, "round": ROUND, "sender": 1, "sequence": hop}
    data = encode.frame(header, ("token", fields | {"listed": 0b111}), *entries)
    return encode.ethernet(MACS[0].hex(":"), data)


@st.composite
def sequences(draw: st.DrawFn) -> list[Step]:
    """Fragments of all three, in turns: sound ones, repeats, and wrong ones."""
    width = draw(st.sampled_from([32, 16, 8]))
    largest = (2 ** (width - 1) - 1) // len(SENDERS)
    payloads = {
        k: np.random.default_rng(draw(st.integers(0, 2**32))).integers(
            -largest, largest, (FRAGMENTS, 1440 * 8 // width), endpoint=True
        )
        for k in SENDERS
    }
    steps = []
    for _ in range(draw(st.integers(1, 16))):
        sender, index = draw(st.sampled_from(SENDERS)), draw(st.integers(0, FRAGMENTS - 1))
        wrong = draw(
            st.sampled_from(
                [""] * 9 + ["mac", "view", "round", "shift", "cut", "width", "index", "place"]
            )
        )
        header = {
            "network": NETWORK,
            "view": VIEW - 1 if wrong == "view" else VIEW,
            "round": ROUND - 1 if wrong == "round" else ROUND,
            "sender": sender,
            "flags": encode.ADD,
        }
        fields = {
            "index": {"index": 5000, "place": 4000}.get(wrong, index),
            "fragments": 5000,
            "width": 33 if wrong == "width" else width,
            "shift": 63 if wrong == "shift" else 0,
            "samples": 1,
        }
        tail = payloads[sender][index].astype(f">i{width // 8}").tobytes()
        data = encode.frame(header, ("fragment", fields), tail=tail)
        source = bytes([2, 0, 0, 0, 0, 9]) if wrong == "mac" else MACS[sender - 1]
        frame = encode.ethernet(source.hex(":"), data)
        steps.append(Step(sender, frame[:-3] if wrong == "cut" else frame, width))
    return steps


def model_switch(controller: int = 64) -> ModelSwitch:
    """With the senders recorded, and nothing else known."""
    members = frozenset((k, MACS[k - 1], k) for k in SENDERS)
    return ModelSwitch(NETWORK, PORTS, controller, members)


def for_hosts(frame: bytes) -> bytes:
    """The same fragment as it would be on a plain LAN."""
    flags = struct.pack(">H", 0)
    return frame[:FLAGS_AT] + flags + frame[FLAGS_AT + 2 :]


def sums_agree(
    steps: Sequence[Step],
    begin: Callable[[Mapping[str, Any]], Target],
    model: ModelSwitch,
    exchange: Callable[[int, bytes], Sequence[bytes]],
) -> int:
    """Run the steps through hosts and switch; how many sums were whole.

    Args:
        begin: the XDP program, empty, in a configuration.
        exchange: gives the switch a frame at a port; what comes out at the listener's.
    """
    sums: list[bytes] = []
    reasons = []
    for hop, step in enumerate(steps, 1):
        exchange(1, token(step.sender, hop))
        before = model.counters.copy()
        sums += exchange(step.sender, step.frame)
        (reason,) = (model.counters - before).keys() - {"switched"}
        reasons.append(SAME.get(reason, reason))
    whole = {s.tag[2] for s in model.sums.values() if s.seen == model.listed}
    for make in (begin, lambda config: ModelTarget(config, MACS)):
        adds = make(CONFIG)
        found = [adds.run(for_hosts(step.frame)).counters for step in steps]
        assert found == [(reason,) for reason in reasons], steps
        added = adds.state().accumulators[ROUND & 1].copy()
        takes = make(CONFIG | {"sums": 1})
        assert {takes.run(frame).counters for frame in sums} <= {("added",), ("duplicate",)}
        taken = takes.state()
        assert {at for _, at in taken.slots} == whole
        per = {32: 4, 16: 2, 8: 1}[steps[0].width]
        for index in whole:
            place = (
                index // per,
                slice((index % per) * 1440 // per, (index % per + 1) * 1440 // per),
            )
            assert (taken.accumulators[ROUND & 1][place] == added[place]).all()
    return len(whole)


def all_send(width: int = 32) -> list[Step]:
    """Two rounds of everything: all sums become whole, and are asked for once more."""
    steps = []
    for number, sender in enumerate((*SENDERS, *SENDERS)):
        for index in range(FRAGMENTS):
            lanes = np.arange(1440 * 8 // width) % 20 - 10 * number - index
            header = {"network": NETWORK, "view": VIEW, "round": ROUND, "sender": sender}
            fields = {"index": index, "fragments": 5000, "width": width, "samples": 1}
            data = encode.frame(
                header | {"flags": encode.ADD},
                ("fragment", fields),
                tail=lanes.astype(f">i{width // 8}").tobytes(),
            )
            frame = encode.ethernet(MACS[sender - 1].hex(":"), data)
            steps.append(Step(sender, frame, width))
    return steps
