# SPDX-License-Identifier: Apache-2.0
"""Sessions without a network for steps of a plan: a round of a channel is committed when the test lets it be."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from nicps.client import JobAborted
from nicps.exchange import Exchange
from nicps.session import shared_form
from nicps.session.sized import Vector
from tests.collectives import Made, make
from tests.fake_session import FakeNetwork, FakeSession

Round = tuple[int, int]  # channel and number


class UrgentFirst(random.Random):
    """In place of chance: of the next rounds of all channels the one on the most urgent channel.

    Members must open a round of each channel at a time.
    """

    def choice(self, seq: Any) -> Any:
        return max(seq)


class PlannedNetwork(FakeNetwork):
    """One whose training steps have a plan.

    Attributes: `order`, where it is set: rounds are committed one by one, each time that all members wait, in an order
    drawn from it; otherwise as soon as all have offered. `held`: rounds that are not committed. `on_wait`: called once,
    when all members wait for rounds that are held. `log`: what has happened, in order: ("commit", channel, round),
    ("forward", member, class of a module). `most_open`: rounds to which a member had offered and which
    were not committed, at one time.
    """

    def __init__(self, members: int, batch: int, order: random.Random | None = None) -> None:
        super().__init__(members, batch)
        self.plan: tuple[shared_form.ChannelPlan, ...] = ()
        self.order = order
        self.held: Callable[[Round], bool] = lambda round_: False
        self.on_wait: Callable[[], None] | None = None
        self.log: list[tuple[Any, ...]] = []
        self.given: dict[Round, dict[int, tuple[Vector, int]]] = {}
        self.made: dict[Round, tuple[shared_form.Committed, Made]] = {}
        self.waiting: set[int] = set()  # members whose thread that computes waits
        self.first_round = 1
        self.most_open = 0

    def enter(self, kind: str, first_round: int, to: Sequence[int] = ()) -> None:  # type: ignore[override]
        if kind == "train":
            first_round = 1 + max((round_ for _, round_ in self.made), default=first_round - 1)
        super().enter(kind, first_round, to)
        self.first_round = first_round
        if kind == "train":
            planned = tuple(
                shared_form.PhaseChannel(each.urgency, each.rounds, first_round)
                for each in self.plan
            )
            for number in to or sorted(self.live):
                self.phases[number][-1] = replace(self.phases[number][-1], channels=planned)
        self.given.clear()

    def decided(self, round_: int, what: str, checkpoint: bool) -> None:
        if self.kind != "train" or what not in ("continue", "plan"):
            super().decided(self.open_round, what, checkpoint)
            return
        self.decisions.append((round_, what))
        self.saves = checkpoint
        if (action := self.after.pop(round_, None)) is not None:
            action()
        elif what == "plan":
            self.enter("train", round_ + 1)

    def session(self, number: int, settings: Mapping[str, Any], name: str = "") -> FakeSession:
        made = self.sessions[number] = PlannedSession(
            self, number, dict(settings), name or f"h{number}"
        )
        return made

    def commit(self, to: Round) -> None:
        """All have offered to it."""
        given = self.given.pop(to)
        listed = sorted(given)
        counted = {number: given[number][1] for number in listed}
        last = to[0] == 0 and not (to[1] + 1 - self.first_round) % len(self.plan[0].rounds)
        message = shared_form.Committed(
            *(to[1], counted, -30, -30, Exchange.STRIPES, 0.0, self.view, tuple(listed)),
            checkpoint=self.saves and last,
            channel=to[0],
        )
        self.made[to] = message, make([given[number][0] for number in listed])
        self.log.append(("commit", *to))
        self.changed.notify_all()

    def advance(self) -> None:
        """Commit what can be; the caller has the lock."""
        whole = [to for to in self._offered_by_all() if not self.held(to)]
        if self.order is None:
            for to in whole:
                self.commit(to)
        elif self.all_wait and whole:
            if isinstance(self.order, UrgentFirst) and len(whole) < self._channels_open():
                return  # the thread of a more urgent channel has not offered yet
            self.commit(self.order.choice(whole))
        if self.all_wait and self.stuck and self.on_wait is not None:
            action, self.on_wait = self.on_wait, None
            action()

    def _offered_by_all(self) -> list[Round]:
        """The open round of each channel to which all have offered; some may have offered to the one after it."""
        done = {*self.made}
        heads = [
            (channel, round_)
            for channel, round_ in sorted(self.given)
            if round_ == self.first_round or (channel, round_ - 1) in done
        ]
        return [to for to in heads if self.given[to].keys() >= self.live]

    def _channels_open(self) -> int:
        """Channels that have rounds left in the step that is under way."""
        done = [
            sum(to[0] == channel and to[1] >= self.first_round for to in self.made)
            for channel in range(len(self.plan))
        ]
        steps = [count // len(plan.rounds) for count, plan in zip(done, self.plan, strict=True)]
        return steps.count(min(steps))

    @property
    def stuck(self) -> bool:
        """Of each channel a round is held, or all of the step are committed."""
        held = {to[0]: to for to in self._offered_by_all()}
        if not held or not all(map(self.held, held.values())):
            return False
        steps = {(to[1] - self.first_round) // len(self.plan[to[0]].rounds) for to in held.values()}
        for channel, plan in enumerate(self.plan):
            done = sum(to[0] == channel and to[1] >= self.first_round for to in self.made)
            if channel not in held and done < (max(steps) + 1) * len(plan.rounds):
                return False
        return True

    @property
    def all_wait(self) -> bool:
        """For what is not committed yet."""
        woken = [self.sessions[number].channels.woken for number in self.live]  # type: ignore[attr-defined]
        return self.waiting >= self.live and min(woken) >= len(self.made)


class PlannedSession(FakeSession):
    """A member's."""

    network: PlannedNetwork

    def ready(  # type: ignore[override]
        self,
        lanes: int,
        digest: str,
        *,
        residual: np.ndarray | None = None,
        settle: Callable[[], object] | None = None,
        plan: Sequence[shared_form.ChannelPlan] = (),
    ) -> None:
        self.network.plan = tuple(plan)
        self.channels = FakeChannels(self)
        super().ready(lanes, digest, residual=residual, settle=settle)

    def closed(self, round_: int) -> bool:
        with self.network.changed:
            return self._new_phase

    def decide(  # type: ignore[override]
        self, round_: int, what: str, *, checkpoint: bool = False, plan: Any = ()
    ) -> bool:
        if plan and self.lead:
            self.network.plan = tuple(plan)
        return super().decide(round_, what, checkpoint=checkpoint)


class FakeChannels:
    """In place of `nicps.session.planned.Channels`."""

    def __init__(self, session: PlannedSession) -> None:
        self.session, self.network = session, session.network
        self.woken = 0

    @property
    def ends(self) -> bool:
        return self.session._new_phase

    def attend(self, done: Callable[[], bool]) -> None:
        network, number = self.network, self.session.number
        with network.changed:
            while not done():
                network.waiting.add(number)
                network.advance()
                if not done():
                    assert network.changed.wait(20.0), f"member {number} waits for ever"
                network.waiting.discard(number)
                if network.reason:
                    raise JobAborted(network.reason)

    def wake(self) -> None:
        with self.network.changed:
            self.woken += threading.current_thread().name == "flow"  # otherwise a part is there
            self.network.waiting.discard(self.session.number)
            self.network.changed.notify_all()

    def offer(self, channel: int, round_: int, vector: Vector, samples: int) -> None:
        with self.network.changed:
            given = self.network.given.setdefault((channel, round_), {})
            given[self.session.number] = vector, samples
            mine = sum(self.session.number in each for each in self.network.given.values())
            self.network.most_open = max(self.network.most_open, mine)
            self.network.advance()

    def wait(
        self, channel: int, round_: int, unless: Callable[[], bool] = lambda: False
    ) -> shared_form.Committed | None:
        network = self.network
        with network.changed:
            done = lambda: (channel, round_) in network.made or self.ends or unless()  # noqa: E731
            network.changed.wait_for(done, 20.0)
            found = network.made.get((channel, round_))
            return found[0] if found is not None else None

    def settle(self, commit: shared_form.Committed, vector: Vector) -> None:
        made = self.network.made[commit.channel, commit.round][1]
        vector.settle(made.outcome(sorted(commit.counted).index(self.session.number)))


class Watched:
    """Notes forward passes of modules in a network's log."""

    def __init__(self, network: PlannedNetwork) -> None:
        self._network = network
        self._hook: Any = None

    def __enter__(self) -> None:
        def note(module: nn.Module, *_: Any) -> None:
            thread = threading.current_thread().name
            self._network.log.append(("forward", thread, type(module).__name__))

        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(note)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
