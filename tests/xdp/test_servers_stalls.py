# SPDX-License-Identifier: Apache-2.0
"""A processor stalls in the middle of a frame of servers, and goes on after others: each interleaving by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nicps import wire
from nicps.dataplane import bpf
from nicps.wire import Refusal
from tests.servers import Stored
from tests.xdp import stall
from tests.xdp.served import COUNTS, Target
from tests.xdp.served_host import ROUND, VIEW, Frames, Host, start
from tests.xdp.stall import Meeting, Met

#: What a later frame may belong to, as (view, round): the agent has begun it while another frame stalls.
LATER = {"round": (VIEW, ROUND + 1), "view": (VIEW + 1, ROUND)}


class Served:
    """A host, and a second processor that stalls in its program."""

    def __init__(self, target: Target, meeting: Meeting) -> None:
        self.target, self._meeting = target, meeting
        self.host = Host(target)

    @property
    def frames(self) -> Frames:
        """Give the host a frame."""
        return self.host.frames

    def give(self, frame: bytes) -> bpf.Run:
        """Give a frame to the program alone: the model's verdict depends on which was first."""
        return self.target.give(frame)

    def enter(self, later: str) -> None:
        """The agent commits the round, or another view is in force."""
        if later == "round":
            self.host.commit()
        else:
            self.host.enter_view()

    def meet(
        self,
        place: int,
        frame: Callable[[Frames], bytes],
        meanwhile: Callable[[], Any],
        prepare: Callable[[], object] = lambda: None,
        **values: Any,
    ) -> Met[Any]:
        """`Meeting.meet`, at a host that is new each time."""

        def begin() -> None:
            self.host = Host(self.target, **values)
            prepare()

        made = frame(Frames(Host(self.target, **values).model))
        return self._meeting.meet(place, made, begin, meanwhile)

    def version(self) -> tuple[int, int]:
        """The round, and the pushes."""
        return divmod(int(self.target.ring["version"][0]), 1 << 32)

    def count(self, bank: int, sender: int) -> tuple[int, int]:
        """Tag and count; no processor is about to count."""
        record = self.target.progress[bank * COUNTS + sender]
        return int(record["tag"]), int(record["count"])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    stall.need_two_processors()
    target = Target(str(stall.SERVERS_SOURCE))
    with ThreadPoolExecutor(1) as pool:
        yield Served(target, Meeting(target.fds, target.give, target.counters, pool))
    target.close()


def taken(run: bpf.Run) -> wire.Taken:
    assert run.verdict == bpf.XDP_TX
    body = wire.unpack(run.frame[wire.ETHERNET_BYTES :]).body
    assert isinstance(body, wire.Taken)
    return body


# ---- the round ends, or a phase


@pytest.mark.parametrize("kind", ["push", "pull"])
def test_a_frame_of_a_round_that_has_ended(served: Served, kind: str) -> None:
    """Its round was open when it was checked: nothing is added, and no parameters of the next round answer it."""
    met = served.meet(
        stall.CHECKED,
        lambda frames: frames.push(9) if kind == "push" else frames.pull(),
        lambda: served.enter("round"),
    )
    assert met.run.verdict == bpf.XDP_DROP and met.counters == {"round": 1}
    assert (served.host.parameters() == start()).all()
    served.target.same_state(served.host.model)


def test_a_push_while_another_phase_begins(served: Served) -> None:
    """The agent has taken the round away, and waits for what is in the program: then it forgets the steps' numbers."""

    def meanwhile() -> None:
        served.target.config["round"] = 0

    met = served.meet(stall.CHECKED, lambda frames: frames.push(9), meanwhile)
    assert met.counters == {"round": 1}
    assert (served.host.parameters() == start()).all()
    assert not served.target.homes["last"].any()


def test_an_average_is_added_once(served: Served) -> None:
    """By a frame that was checked before the commit, though it is too late for anything else."""

    def meanwhile() -> int:
        served.host.commit()
        return served.give(served.frames.pull()).verdict

    met = served.meet(
        stall.CHECKED,
        lambda frames: frames.pull(),
        meanwhile,
        lambda: served.host.contribute(8, 3, 0b100),
    )
    assert met.meanwhile == bpf.XDP_TX and met.counters == {"pulled": 1, "round": 1}
    assert (served.host.parameters() == start() + 8).all()


# ---- two in one home


@pytest.mark.parametrize("other", ["push", "the same push", "pull", "contribute"])
@pytest.mark.parametrize("first", ["push", "pull", "contribute"])
def test_who_meets_a_claim_is_sent_again(served: Served, first: str, other: str) -> None:
    """Nothing of it is added meanwhile, and a pull reads nothing that is half added."""
    makes: dict[str, Callable[[Frames], bytes]] = {
        "push": lambda frames: frames.push(9),
        "the same push": lambda frames: frames.push(9),
        "pull": lambda frames: frames.pull(),
        "contribute": lambda frames: frames.contribute(7, 4, 0b11000),
    }
    if other == "push":
        makes[other] = lambda frames: frames.push(5, sender=5)
    met = served.meet(
        stall.CLAIMED,
        lambda frames: makes["the same push" if first == "push" else first](frames),
        lambda: served.give(makes[other](served.frames)).verdict,
    )
    counter = {"push": "pushed", "pull": "pulled", "contribute": "gathered"}[first]
    assert met.meanwhile == bpf.XDP_DROP and met.counters == {"busy": 1, counter: 1}
    assert (served.host.parameters() == start() + 9 * (first == "push")).all()


def test_two_processors_push_into_one_home(served: Served) -> None:
    """Really at the same time: every lane of every step is in the sum."""
    served.host = Host(served.target)
    steps, frames = 400, Frames(served.host.model)
    made = {
        worker: [frames.push(worker, 0, number, sender=worker) for number in range(1, steps + 1)]
        for worker in (3, 4)
    }

    def push(worker: int) -> None:
        for frame in made[worker]:
            while served.give(frame).verdict != bpf.XDP_TX:
                pass

    with ThreadPoolExecutor(2) as both:
        list(both.map(push, made))
    assert (served.host.parameters() == start() + steps * 7).all()
    assert served.count(0, 3) == served.count(0, 4) == (steps, 1)


# ---- staleness


def test_staleness_is_fixed_once(served: Served) -> None:
    """Two fragments of one push, and others' pushes become whole between them: both have one weight."""

    def meanwhile() -> wire.Push:
        for index in (1, 2):
            served.give(served.frames.push(0, index, sender=4))
        assert served.version() == (ROUND, 2), "the first fragment is still claimed"
        frame = wire.unpack(served.give(served.frames.push(40, 1)).frame[wire.ETHERNET_BYTES :])
        assert isinstance(frame.body, wire.Push)
        return frame.body

    met = served.meet(
        stall.FIXED,
        lambda frames: frames.push(40, version=1),
        meanwhile,
        room=3,
        version=(ROUND, 2),
    )
    assert met.meanwhile.staleness == 2
    assert (served.host.parameters() == start() + 20).all()
    assert (served.host.parameters(1) == start(1) + 20).all()


def test_a_newer_step_has_begun(served: Served) -> None:
    """A worker that does so does not wait for its acknowledgements: the older step is not added under the newer."""
    met = served.meet(
        stall.FIXED,
        lambda frames: frames.push(40),
        lambda: served.give(served.frames.push(1, 1, number=2)).verdict,
    )
    assert met.meanwhile == bpf.XDP_TX and met.counters == {"pushed": 1, "round": 1}
    assert (served.host.parameters() == start()).all()
    assert served.count(0, 3) == (2, 1)


def test_an_older_step_while_a_newer_one_begins(served: Served) -> None:
    """The newer one's weight is fixed, and nothing of it is counted: the older one is not added with that weight."""
    met = served.meet(
        stall.FIXED,
        lambda frames: frames.push(40, 1, number=2),
        lambda: served.give(served.frames.push(1)).verdict,
    )
    assert met.meanwhile == bpf.XDP_DROP and met.counters == {"pushed": 1, "round": 1}
    assert (served.host.parameters() == start()).all()
    assert served.count(0, 3) == (2, 1)


# ---- counting


def test_a_duplicate_of_what_is_not_counted_yet(served: Served) -> None:
    """It is acknowledged, and so the worker may begin its next step: that waits for the count."""

    def meanwhile() -> tuple[wire.Taken, int]:
        again = taken(served.give(served.frames.push(40)))
        return again, served.give(served.frames.push(1, 1, number=2)).verdict

    met = served.meet(stall.ADDED, lambda frames: frames.push(40), meanwhile)
    again, newer = met.meanwhile
    assert (again.reason, again.number, again.staleness) == (Refusal.NONE, 1, 1)
    assert newer == bpf.XDP_DROP
    assert met.counters == {"pushed": 1, "duplicate": 1, "busy": 1}
    assert served.count(0, 3) == (1, 1)
    assert served.give(served.frames.push(1, 1, number=2)).verdict == bpf.XDP_TX
    assert served.count(0, 3) == (2, 1)
    assert (served.host.parameters() == start() + 40).all()


def test_who_counts_last_raises_the_version(served: Served) -> None:
    met = served.meet(
        stall.ADDED,
        lambda frames: frames.push(40),
        lambda: (served.give(served.frames.push(40, 1)), served.version())[1],
    )
    assert met.meanwhile == (ROUND, 0) and served.version() == (ROUND, 1)


@pytest.mark.parametrize("later", LATER)
def test_a_push_that_is_added_counts_for_its_round(served: Served, later: str) -> None:
    """The agent has begun another one, whose version it does not raise; another view goes on with the round."""
    met = served.meet(
        stall.ADDED,
        lambda frames: frames.push(40, 1),
        lambda: served.enter(later),
        lambda: served.host.push(40),
    )
    assert met.run.verdict == bpf.XDP_TX and met.counters == {"pushed": 1}
    assert served.version() == ((ROUND, 1) if later == "view" else (ROUND + 1, 0))
    assert (served.host.parameters(1) == start(1) + 40).all()


@pytest.mark.parametrize("later", ["nothing", *LATER])
def test_a_whole_push_raises_the_version_of_its_round_only(served: Served, later: str) -> None:
    """Others' pushes become whole before it has: both count."""

    def meanwhile() -> None:
        for index in range(2):
            served.give(served.frames.push(1, index, sender=4))
        if later != "nothing":
            served.enter(later)

    def prepare() -> None:
        served.host.push(40)

    met = served.meet(stall.WHOLE, lambda frames: frames.push(40, 1), meanwhile, prepare)
    assert met.counters == {"pushed": 3}
    if later == "round":
        assert served.version() == (ROUND + 1, 0)
    elif later == "nothing":
        assert served.version() == (ROUND, 2)
    else:
        assert served.version()[0] == ROUND


def test_a_version_is_no_more_than_what_is_in(served: Served) -> None:
    """A pull reads it before it claims: meanwhile a push becomes whole, which is in the parameters that it gets."""
    met = served.meet(
        stall.CHECKED,
        lambda frames: frames.pull(),
        lambda: [served.give(served.frames.push(40, index)) for index in range(2)],
    )
    frame = wire.unpack(met.run.frame[wire.ETHERNET_BYTES :])
    assert isinstance(frame.body, wire.Held) and frame.body.version == 0
    assert served.version() == (ROUND, 1)
    assert (served.host.parameters() == start() + 40).all()


# ---- synchronisations


@pytest.mark.parametrize("place", [stall.CHECKED, stall.CLAIMED])
def test_a_contribution_of_a_view_that_has_ended(served: Served, place: int) -> None:
    """Its home has the next view's by then, or is claimed: the next view's is sent again, and writes over it."""

    def meanwhile() -> int:
        served.enter("view")
        return served.give(served.frames.contribute(6, 4, 0b1000)).verdict

    met = served.meet(place, lambda frames: frames.contribute(100, 3), meanwhile, room=1)
    if place == stall.CHECKED:
        assert met.meanwhile == bpf.XDP_TX and met.counters == {"summed": 1, "round": 1}
    else:
        assert met.meanwhile == bpf.XDP_DROP and met.counters == {"busy": 1, "gathered": 1}
        assert served.give(served.frames.contribute(6, 4, 0b1000)).verdict == bpf.XDP_TX
    assert served.count(0, 0) == ((VIEW + 1) << 32 | ROUND, 1)
    served.host.commit()
    served.give(served.frames.pull())
    assert (served.host.parameters() == start() + 6).all()


def test_an_average_counts_for_its_view(served: Served) -> None:
    """It is made, and not counted: until it is, none of the next view is made."""

    def meanwhile() -> tuple[int, int]:
        pulled = taken(served.give(served.frames.pull())).reason
        served.enter("view")
        return pulled, served.give(served.frames.contribute(6, 4, 0b1000)).verdict

    met = served.meet(stall.ADDED, lambda frames: frames.contribute(100, 3, 0b100), meanwhile)
    assert met.meanwhile == (Refusal.SYNCHRONISING, bpf.XDP_DROP)
    assert met.counters == {"summed": 1, "refused": 1, "busy": 1}
    assert served.count(0, 0) == (VIEW << 32 | ROUND, 1)
    assert served.give(served.frames.contribute(6, 4, 0b1000)).verdict == bpf.XDP_TX
    assert served.count(0, 0) == ((VIEW + 1) << 32 | ROUND, 1)


# ---- a worker


def worker(**values: Any) -> dict[str, Any]:
    """Member 1 of a job whose server is 2."""
    store = {place: Stored() for place in range(2)}
    return {"servers": (2,), "store": store, "taken": dict.fromkeys(range(2), 0), **values}


def test_late_parameters_of_an_earlier_pull(served: Served) -> None:
    met = served.meet(
        stall.CHECKED,
        lambda frames: frames.held(0, 1, lane=5),
        lambda: served.give(served.frames.held(0, 2, lane=6)),
        **worker(),
    )
    assert met.counters == {"stored": 1, "duplicate": 1}
    assert int(served.target.store["tag"][0]) == 2
    assert served.target.store["lane"][0].tobytes() == b"\0\0\0\6" * 360


def test_a_later_pull_waits_until_an_earlier_one_is_counted(served: Served) -> None:
    met = served.meet(
        stall.ADDED,
        lambda frames: frames.held(0, 1),
        lambda: served.give(served.frames.held(1, 2)).verdict,
        **worker(),
    )
    assert met.meanwhile == bpf.XDP_DROP and met.counters == {"stored": 1, "busy": 1}
    assert served.count(1, 0) == (1, 1)


def test_a_partner_asks_for_what_is_just_stored(served: Served) -> None:
    """It gets all of it or nothing."""
    met = served.meet(
        stall.CLAIMED,
        lambda frames: frames.held(0, 1),
        lambda: served.give(served.frames.pull(0)).verdict,
        **worker(),
    )
    assert met.meanwhile == bpf.XDP_DROP and met.counters == {"stored": 1, "busy": 1}
