# SPDX-License-Identifier: Apache-2.0
"""Parameter servers under seeded schedules of faults, and that the simulator can find a mistake in them.

A seed that fails names itself: `python -m tests.simulator --seed N --exchange servers --trace 200`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nicps.exchange import Exchange
from nicps.protocol import Phase, View
from nicps.protocol.goes_on import GoesOn
from nicps.protocol.served_ring import ServedRing
from tests.simulator import partners, schedules, served_schedules, servers
from tests.simulator.drill import run
from tests.simulator.schedules import Violation
from tests.simulator.served_host import ServedHost
from tests.simulator.served_places import Home, Part, ServedFrame
from tests.simulator.servers import ServersKernel

pytestmark = pytest.mark.unit

CHUNK = 25


@pytest.mark.short("0")
@pytest.mark.parametrize("chunk", range(4))
def test_seeds(chunk: int) -> None:
    """In the others the starter is lost, or a majority, or nobody is left who has the parameters."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert run(seeds, exchange=Exchange.SERVERS)["done"] >= CHUNK * 3 // 5


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 12_000, 50))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 50), exchange=Exchange.SERVERS)


def test_a_token_whose_sender_dies_before_its_owner_has_it() -> None:
    """The server h1 passes the token to h3, which is cut off, and is started anew. h4 has heard the token, and takes h3
    for its holder; h2 and h3 have not, and take h4 for it. Both repeat their offers: R17 finds the loss all the same.
    """
    assert schedules.run(701815, None, Exchange.SERVERS).what == "done"


def test_what_a_killed_worker_has_saved_is_the_jobs_result() -> None:
    """FINISH makes each save. The only worker is killed as STOP comes; of two servers neither has all parameters."""
    assert schedules.run(701394, None, Exchange.SERVERS).what == "done"


def test_a_worker_that_is_started_anew_fills_no_part() -> None:
    """Another host is to serve, filled out of its store, when it is killed and started anew with nothing in it."""
    assert schedules.run(720000, None, Exchange.SERVERS).what == "stopped"


def test_a_worker_that_serves_now_pulls_nothing_late() -> None:
    """It had not pulled the last commit as a worker; as a server it goes on in a view in the middle of a phase."""
    assert schedules.run(741459, None, Exchange.SERVERS).what == "done"


def saves_nothing(patch: pytest.MonkeyPatch) -> None:
    """FINISH is acknowledged, and no file is written."""
    patch.setattr(ServedHost, "_save", lambda self: None)


def goes_on_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits until all have read the round before."""
    patch.setattr(GoesOn, "is_read", lambda self, round_: True)


def begins_a_phase_at_once(patch: pytest.MonkeyPatch) -> None:
    """In its first round nobody waits until all have pulled the last commit."""
    make = GoesOn.__init__

    def make_known(self: GoesOn, phase: Phase, view: View, known: int) -> None:
        make(self, phase, view, max(known, phase.first_round))

    patch.setattr(GoesOn, "__init__", make_known)


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


def passes_on_what_is_old(patch: pytest.MonkeyPatch) -> None:
    """A partner's kernel does not compare rounds."""

    def hand_over(kernel: ServersKernel, frame: ServedFrame) -> Iterator[None]:
        stored = kernel.store[frame.index]
        round_, stored.rest = stored.rest, (frame.round, 0)
        yield from partners.hand_over(kernel, frame)
        stored.rest = round_

    patch.setattr(servers, "hand_over", hand_over)


def test_partners_pass_parameters_on() -> None:
    """Where a seed has sets, and more than one worker."""
    lans = [served_schedules.lan_of(seed) for seed in range(12)]
    given = []
    for lan in (lan for lan in lans if lan.sets and len(lan.hosts) > lan.servers + 1):
        schedules.finish(lan)
        given.append(sum(host.servers.passed_on for host in lan.hosts))  # type: ignore[attr-defined]
    assert len(given) > 1 and all(given)


def run_all(seeds: range) -> None:
    """Up to the first that fails."""
    for seed in seeds:
        schedules.run(seed, None, Exchange.SERVERS)


@pytest.mark.parametrize(
    ("mistake", "seeds", "found"),
    [
        (goes_on_at_once, range(5, 10), "6: "),
        (begins_a_phase_at_once, range(730097, 730098), "6: "),
        (adds_what_is_dropped, range(6), "7: "),
        (forgets_what_is_begun, range(30), "the job has not ended"),
        (passes_on_what_is_old, range(30), "11: "),
        (saves_nothing, range(701394, 701395), "the job ended too early"),
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
