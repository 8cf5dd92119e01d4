# SPDX-License-Identifier: Apache-2.0
"""The agent writes the XDP program's settings while frames come in: what is added between two words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.frames import write_settings
from nicps.protocol import KernelState
from tests.model import Config, XdpModel

NETWORK, VIEW, ROUND = 1, 3, 7
MACS = [bytes([2, 0, 0, 0, 0, number]) for number in (1, 2)]
HOSTS = KernelState(ROUND, ROUND, ROUND, 0, 0, bounce=True)
SWITCH = replace(HOSTS, sums=True, sums_next=True)


def of(state: KernelState, round_: int, high: int | None = None, **fields: Any) -> KernelState:
    """A state in that round."""
    high = round_ if high is None else high
    return replace(state, round=round_, round_low=round_, round_high=high, **fields)


#: What follows on what (`Host.kernel`); R is the open round.
STEPS = {
    "the switch's phase comes": (HOSTS, of(HOSTS, ROUND, ROUND + 1, sums_next=True)),
    "the switch's phase is here": (
        of(HOSTS, ROUND, ROUND + 1, sums_next=True, bounce=False),
        of(SWITCH, ROUND + 1),
    ),
    "the hosts' phase comes": (SWITCH, of(SWITCH, ROUND, ROUND + 1, sums_next=False)),
    "the hosts' phase is here": (
        of(SWITCH, ROUND, ROUND + 1, sums_next=False, bounce=False),
        of(HOSTS, ROUND + 1),
    ),
    "complete": (HOSTS, of(HOSTS, ROUND, ROUND + 1)),
    "committed": (of(HOSTS, ROUND, ROUND + 1), of(HOSTS, ROUND + 1)),
    "committed, of the switch": (of(SWITCH, ROUND, ROUND + 1), of(SWITCH, ROUND + 1)),
}


def frames() -> list[bytes]:
    """A member's fragment, and a switch's sum, of each round around."""
    out = []
    for round_ in range(ROUND - 1, ROUND + 3):
        for sender, mac, flags in ((2, MACS[1], 0), (2, MACS[1], 32), (0, wire.SWITCH, 32)):
            header = wire.Header(
                network=NETWORK, view=VIEW, round=round_, sender=sender, flags=flags
            )
            body = wire.Fragment(0, 1, 360, 32, 0, 1)
            out.append(wire.ethernet(mac, wire.pack(header, body, tail=bytes(1440))))
    return out


def added(words: dict[str, Any]) -> set[int]:
    """Which of `frames` the program adds under these settings."""
    names = Config.__dataclass_fields__
    config = Config(**{name: value for name, value in words.items() if name in names})
    taken = set()
    for place, frame in enumerate(frames()):
        if "added" in XdpModel(config, MACS).run(frame).counters:
            taken.add(place)
    return taken


class Words(dict[str, Any]):
    """The settings, and what is added after each word is written."""

    def __init__(self, first: dict[str, Any]) -> None:
        super().__init__(first)
        self.added: list[tuple[str, set[int]]] = []

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.added.append((name, added(self)))


@pytest.mark.parametrize("step", STEPS)
def test_between_two_words_nothing_is_added_that_neither_settings_allow(step: str) -> None:
    old, new = STEPS[step]
    blank = {"network": NETWORK, "view": VIEW, "number": 1, "members": 2, "live": 2, "blocks": 1}
    before = Words(blank)
    write_settings(before, {}, old)
    words = Words(dict(before))
    write_settings(words, {}, new)
    allowed = before.added[-1][1] | words.added[-1][1]
    assert allowed
    for name, taken in words.added:
        assert taken <= allowed, f"after {name}"
    assert words["bounce"] == new.bounce


def test_a_new_view_takes_nothing_before_its_settings_are_whole() -> None:
    closed = {"round_low": 1, "round_high": 0, "enabled": 0}
    words = Words(
        {"network": NETWORK, "view": VIEW, "number": 1, "members": 2, "blocks": 1} | closed
    )
    write_settings(words, {}, SWITCH)
    assert words.added[-1] == ("enabled", {5})
    assert not any(taken for _, taken in words.added[:-1])
