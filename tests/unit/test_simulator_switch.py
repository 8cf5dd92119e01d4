# SPDX-License-Identifier: Apache-2.0
"""The exchange switch under seeded schedules of faults, and that the simulator can find a mistake in it.

A seed that fails names itself: `python -m tests.simulator --seed N --exchange switch --trace 200`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol.exchange import _EXCHANGERS
from nicps.protocol.exchange.switch import SwitchExchanger
from tests.simulator import schedules
from tests.simulator.__main__ import Job, one
from tests.simulator.lan import Conditions, Lan
from tests.simulator.schedules import Violation
from tests.simulator.switch import QUANTUM, Switch

pytestmark = pytest.mark.unit

CHUNK = 15
#: How many of seeds 0 to 14 end well, and so on.
DONE = (9, 11, 10)


def run(seeds: range, hosts: int | None = None) -> Counter[str]:
    """How often each outcome came."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        _, what, why = one(Job(seed, hosts, Exchange.SWITCH))
        assert what not in ("violation", "error"), f"seed {seed}, hosts {hosts}: {why}"
        outcomes[what] += 1
    return outcomes


@pytest.mark.short("0-9")
@pytest.mark.parametrize(("chunk", "done"), list(enumerate(DONE)))
def test_seeds(chunk: int, done: int) -> None:
    """In the others the starter is lost, or a majority, or nobody is left who has the job."""
    assert run(range(chunk * CHUNK, (chunk + 1) * CHUNK))["done"] >= done - 1


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 11_000, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25))


def job(loss: float = 0.02, slots: int = 2 * QUANTUM, quorum: float = 1.0, **more: Any) -> Lan:
    """A job of many windows, in which frames are lost."""
    exchange = Exchange.SWITCH
    plan = Plan("job", batch=50, width=16, alarm_below=0.0, quorum=quorum, exchange=exchange)
    lan = Lan(5, Conditions(loss=loss), 7, plan, rounds=12, fragments=60, **more)
    lan.switch = Switch(slots=slots)
    lan.hosts[0].submit()
    lan.at(0.5, lambda: schedules.watch(lan, "", 0.0))
    return lan


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(4 * QUANTUM, marks=pytest.mark.long),
        pytest.param(2 * QUANTUM, marks=pytest.mark.long),
        2 * QUANTUM - 1,
        1,
    ],
)
def test_a_switch_of_any_room_adds_all(slots: int) -> None:
    lan = job(slots=slots)
    rounds = added(lan)
    assert schedules.finish(lan).what == "done"
    assert max(Counter(rounds).values()) > 3, "the switch, and not the hosts"


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_without_loss_nothing_is_sent_again(loss: float) -> None:
    lan, again = job(loss=loss), Counter[bool]()

    def note(_: Any, action: Any) -> bool:
        if getattr(action, "exchange", None) == Exchange.SWITCH and hasattr(action, "repair"):
            again[action.repair] += 1
        return False

    lan.moments.append(note)
    assert schedules.finish(lan).what == "done"
    assert again[False] > 0 and (again[True] > 0) == (loss > 0)


def added(lan: Lan) -> list[int]:
    """By round, each commit of what a switch has added."""
    rounds: list[int] = []

    def note(_: Any, action: Any) -> bool:
        exchange = getattr(action, "exchange", None)
        if exchange == Exchange.SWITCH and getattr(action, "counted", None):
            rounds.append(action.round)
        return False

    lan.moments.append(note)
    return rounds


class Hasty(SwitchExchanger):
    """Its window is larger by one."""

    def _begin(self, now: float) -> None:
        super()._begin(now)
        self._window += 1


class Alone(SwitchExchanger):
    """It forgets members that are not in the list."""

    @property
    def _everybody(self) -> int:
        return self._listed


def found(lan: Lan) -> str:
    with pytest.raises(Violation) as violation:
        schedules.finish(lan)
    return str(violation.value)


def test_a_window_that_is_too_large_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_EXCHANGERS, Exchange.SWITCH, Hasty)
    assert "whose slot is taken" in found(job(loss=0.1))


def test_a_window_that_nobody_outside_the_list_limits_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow host is in no list, and gets no sums for a while."""

    def slow() -> Lan:
        lan = job(loss=0.0, quorum=0.6, compute_s=0.02)
        lan.hosts[4].slowness = 10.0
        for step in range(20):
            at = 0.9 + step * 0.05
            lan.at(at, lambda: setattr(lan, "deaf", lan.hosts[4]))
            lan.at(at + 0.01, lambda: setattr(lan, "deaf", None))
        lan.trouble(2.0)
        return lan

    assert schedules.finish(slow()).what == "done"
    monkeypatch.setitem(_EXCHANGERS, Exchange.SWITCH, Alone)
    assert "h5 lacks sum" in found(slow())
