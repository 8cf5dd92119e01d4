# SPDX-License-Identifier: Apache-2.0
"""A job's training step by a plan, on several channels at once (docs/channels.md): a thread for each channel.

flows = Flows(session, parts, width)     # parts by channel, in the order of their rounds
flows.begin(phase, rounds)
sum_ = flows.offer(channel, samples)     # its next part is whole: it goes out; `sum_` is done once it is a mean
...
commit = flows.finish()                  # all parts are sums by the samples
session.applied(commit, digest)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from nicps.client import Commit, Phase, Session
from nicps.collective.feedback import Compressed
from nicps.errors import JobFailed
from nicps.session.lanes import F32, LaneFormat
from nicps.session.shared_form import ChannelPlan, Committed
from nicps.steps import StepEnded

__all__ = ["ChannelPlan", "Flows", "Part", "Times", "plan_of"]


class Part(NamedTuple):
    """What one round brings: float32 (n,), which goes out, and whose place the mean takes; and what rounding leaves
    over of it.
    """

    vector: F32
    residual: F32


def plan_of(parts: Sequence[Sequence[Part]], width: int) -> tuple[ChannelPlan, ...]:
    """The plan of a step with these parts by channel; a channel's number is its urgency."""
    return tuple(
        ChannelPlan(
            urgency,
            tuple(LaneFormat(len(part.vector), width).fragments for part in channel),
        )
        for urgency, channel in enumerate(parts)
    )


class Times(NamedTuple):
    """Of one round, on the clock: this member had offered; all had; it was committed here; its mean was there.

    What was offered before the channel's round before was committed counts as offered then.
    """

    offered: float
    listed: float
    committed: float
    done: float


@dataclass(slots=True, eq=False)
class _Round:
    """A part on its way, which this member has `samples` for; 0: it only reads.

    Attributes: `number`, the round's; `alone`, it goes out once the one before it is a mean; `vector`, None until the
    part has gone out; `offered`, when it had; `free`, when the round before it was committed.
    """

    step: int
    channel: int
    place: int
    number: int
    samples: int
    mean: Future[None]
    alone: bool
    vector: Compressed | None = None
    offered: float = 0.0
    free: float = 0.0


class Flows:
    """The steps of one training program, one after the other.

    Args:
        parts: by channel, in the order of their rounds.
        width: of the job's lanes, in bits.
        together: channels have rounds open at the same time. Otherwise rounds come one after the other, in the order of
            the offers, which is the same at all members then.

    Attributes: `commits`, of the parts of this step whose means are there, and `times` of those that this member has
    offered, by channel and place.
    """

    def __init__(
        self,
        session: Session,
        parts: Sequence[Sequence[Part]],
        width: int,
        *,
        together: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert session.channels is not None, "only of a job whose steps have a plan"
        self._session, self._channels = session, session.channels
        self._parts, self._width, self._clock = parts, width, clock
        self._lock = threading.Lock()
        self._step = 0  # counts them; what is of an earlier one is dropped
        self._rounds: list[int] = []  # the first one of each channel in the step
        self._given: list[int] = []  # parts that were given to the channel's thread
        self.commits: dict[tuple[int, int], Committed] = {}
        self.times: dict[tuple[int, int], Times] = {}
        self._in_a_queue, self._together = not together, together
        self._done = 0  # parts whose means are there, or do not come
        self._failure: BaseException | None = None
        count = len(parts) if together else 1
        self._queues = [SimpleQueue[_Round | None]() for _ in range(count)]
        for queue in self._queues:
            threading.Thread(target=self._flow, args=(queue,), name="flow", daemon=True).start()

    @property
    def plan(self) -> tuple[ChannelPlan, ...]:
        """The plan of a step."""
        return plan_of(self._parts, self._width)

    def begin(self, phase: Phase, rounds: Sequence[int], *, together: bool = True) -> None:
        """A step begins, with these rounds of each channel.

        Args:
            together: False: in this step rounds come one after the other, in the order of the offers here.

        Raises:
            JobFailed: the phase has another plan.
        """
        agreed = [channel.rounds for channel in phase.channels]
        own = [channel.rounds for channel in self.plan]
        if agreed != own:
            raise JobFailed(
                f"the lead plans a step with rounds of {agreed} fragments, and the model here needs {own}: the same"
                " job.py and the same versions are needed on every host"
            )
        with self._lock:
            self._step += 1
            self._rounds, self._given = list(rounds), [0] * len(self._parts)
            self.commits, self.times, self._done = {}, {}, 0
            self._together = together and not self._in_a_queue

    def offer(self, channel: int, samples: int) -> Future[None]:
        """The next part of that channel is whole, the sum over `samples`: it goes out.

        Args:
            samples: 0: this member has no part in the step, and only reads the sums.

        Returns:
            A future that is done once the mean is in its place. It fails with StepEnded if that does not come. The
            thread that computes waits for it in `Channels.attend`.
        """
        mean = Future[None]()
        with self._lock:
            place = self._given[channel]
            self._given[channel] += 1
            queue = self._queues[channel if self._together else 0]
            number, alone = self._rounds[channel] + place, not self._together
            queue.put(_Round(self._step, channel, place, number, samples, mean, alone))
        self._channels.wake()  # the channel's thread may wait for a commit
        return mean

    def offer_rest(self, samples: int) -> None:
        """All parts that have not gone out do, in the order of the plan."""
        for place in range(max(map(len, self._parts))):
            for channel, parts in enumerate(self._parts):
                if place < len(parts) and place >= self._given[channel]:
                    self.offer(channel, samples)

    @property
    def settled(self) -> bool:
        """All that has been offered in this step is committed and read."""
        return len(self.commits) == sum(self._given)

    def finish(self) -> Commit:
        """Wait until all parts are there, which have been offered, or are about to be.

        Returns the last round of channel 0, as `Session.applied` needs it.

        Raises:
            StepEnded: the phase has ended: nothing of the step counts.
            JobAborted: the job was stopped.
        """
        count = sum(map(len, self._parts))
        self._channels.attend(lambda: self._failure is not None or self._done == count)
        if self._failure is not None:
            raise self._failure
        if len(self.commits) < count:
            raise StepEnded
        last = self.commits[0, len(self._parts[0]) - 1]
        return Commit.of(last, offered=last.counted.get(self._session.number, 0) > 0)

    def give_up(self) -> None:
        """Nothing more of the step that is under way goes out, or is read."""
        with self._lock:
            self._step += 1

    def close(self) -> None:
        """End the threads; a step that is under way is given up."""
        self.give_up()
        for queue in self._queues:
            queue.put(None)

    # ---- a channel's thread

    def _flow(self, queue: SimpleQueue[_Round | None]) -> None:
        round_ = queue.get()
        while round_ is not None:
            following = None
            if round_.vector is not None or self._let_out(round_):
                following = self._complete(round_, queue)
            round_ = following or queue.get()

    def _let_out(self, round_: _Round) -> bool:
        """Offer the part, and convert it; whether it is on its way."""
        if round_.step != self._step:
            round_.mean.cancel()
            return False
        part = self._parts[round_.channel][round_.place]
        round_.offered = self._clock()
        try:
            vector = Compressed(part.vector, part.residual, self._width, mean=False)
            if round_.samples and not self._channels.ends:
                self._channels.offer(round_.channel, round_.number, vector, round_.samples)
        except BaseException as failure:
            self._end(round_, failure)
            return False
        round_.vector = vector
        return True

    def _complete(self, round_: _Round, queue: SimpleQueue[_Round | None]) -> _Round | None:
        """The part's sum comes, and is read. The part that follows, if it was taken from the queue meanwhile.

        That one goes out as soon as it is there. While this one is on its way the agent keeps the offer, and gives it
        to its round the moment that is open. At the latest it goes out before this sum is read: until then the line of
        the channel is idle, while this sum is here already. Forward does not wait longer for that: a channel's parts
        come from the rear to the front, so it needs the later one first.

        There are two banks. The part that follows is in that of the round before this one. That is read, and committed,
        so nobody needs its lanes any more (`Channels.offer`). A member marks a round only once it has read the one
        before it (`OpenRound.held_back`), and so nobody writes a sum into this one's bank before it is read here.
        """
        following: _Round | None = None
        failure: BaseException | None = None
        try:
            which = round_.channel, round_.number
            commit = self._channels.wait(*which, lambda: not queue.empty())
            committed = self._clock()
            following = self._take_next(round_, queue)
            if commit is None:
                commit = self._channels.wait(*which)
                committed = self._clock()
            if following is not None:
                following.free = committed
            if commit is not None:
                self._settle(round_, commit, committed)
            else:
                failure = StepEnded()
        except BaseException as error:
            failure = error
        self._end(round_, failure)
        return following

    def _take_next(self, before: _Round, queue: SimpleQueue[_Round | None]) -> _Round | None:
        """The part that follows, if it is there; it goes out, unless the one before it must be a mean for that."""
        if queue.empty():
            return None
        following = queue.get()
        if following is None:
            queue.put(None)  # the end, which `_flow` takes
        elif not following.alone and following.step == before.step and not self._let_out(following):
            return None
        return following

    def _settle(self, round_: _Round, commit: Committed, committed: float) -> None:
        """The part becomes a mean."""
        assert round_.vector is not None
        self._channels.settle(commit, round_.vector)
        part, at = self._parts[round_.channel][round_.place], (round_.channel, round_.place)
        samples = sum(commit.counted.values())
        if samples:
            np.divide(part.vector, np.float32(samples), out=part.vector)
        else:
            part.vector[:] = 0.0
        offered = max(round_.offered, round_.free)
        listed = max(offered, round_.offered + commit.seconds_listed)
        self.times[at] = Times(offered, listed, committed, self._clock())
        self.commits[at] = commit

    def _end(self, round_: _Round, failure: BaseException | None = None) -> None:
        """The part is a mean, or does not come."""
        if failure is None:
            round_.mean.set_result(None)
        else:
            if not isinstance(failure, StepEnded):
                self._failure = failure  # the thread that computes raises it
            round_.mean.set_exception(failure)
        with self._lock:
            self._done += round_.step == self._step
        self._channels.wake()
