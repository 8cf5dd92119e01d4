# SPDX-License-Identifier: Apache-2.0
"""Parameter servers under seeded schedules of faults, and that the simulator can find a mistake in them.

A seed that fails names itself: `python -m tests.simulator --seed N --exchange servers --trace 200`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nicps.exchange import Exchange
from nicps.protocol.goes_on import GoesOn
from nicps.protocol.served_ring import ServedRing
from tests.simulator import schedules
from tests.simulator.drill import run
from tests.simulator.schedules import Violation
from tests.simulator.servers import Home, Part, ServersKernel

pytestmark = pytest.mark.unit

CHUNK = 25


@pytest.mark.parametrize("chunk", range(4))
def test_seeds(chunk: int) -> None:
    """In the others the starter is lost, or a majority, or nobody is left who has the parameters."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert run(seeds, exchange=Exchange.SERVERS)["done"] >= CHUNK * 3 // 5


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 12_000, 50))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 50), exchange=Exchange.SERVERS)


def goes_on_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits until all have read the round before."""
    patch.setattr(GoesOn, "is_read", lambda self, round_: True)


def adds_what_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """A home's average is added before the round is committed."""
    claim = ServersKernel._claim

    def settle(self: ServersKernel, home: Home, part: Part, round_: int) -> bool:
        settled, self.settled = self.settled, 1 << 31
        claimed = claim(self, home, part, round_)
        self.settled = settled
        return claimed

    patch.setattr(ServersKernel, "_claim", settle)


def forgets_what_is_begun(patch: pytest.MonkeyPatch) -> None:
    """A push does not go on in the next view."""
    carry = ServedRing.carry

    def forget(self: ServedRing) -> object:
        self._served._begun = self._servers.begun = None
        return carry(self)

    patch.setattr(ServedRing, "carry", forget)


def run_all(seeds: range) -> None:
    """Up to the first that fails."""
    for seed in seeds:
        schedules.run(seed, None, Exchange.SERVERS)


@pytest.mark.parametrize(
    ("mistake", "seeds", "found"),
    [
        (goes_on_at_once, range(3), "6: "),
        (adds_what_is_dropped, range(6), "7: "),
        (forgets_what_is_begun, range(30), "the job has not ended"),
    ],
)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None],
    seeds: range,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    with pytest.raises(Violation, match=found):
        run_all(seeds)
