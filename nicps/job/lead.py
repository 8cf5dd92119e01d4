# SPDX-License-Identifier: Apache-2.0
"""The lead's side of a job: its course, and what it needs of this host's own part (R5 to R7, R14, R20 to R22)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.actions import CloseStream, Log
from nicps.job.checkpoints import STATE
from nicps.job.choice import Wait
from nicps.job.course import Course
from nicps.job.node_info import NodeInfo
from nicps.job.orders import (
    CommitNext,
    OfferStream,
    Order,
    Orders,
    PublishEvent,
    SaveState,
    Saving,
)
from nicps.job.part import Part
from nicps.job.plan import Found, Plan
from nicps.job.slow_work import Folder, OpenStream, StreamSize
from nicps.job.submission import Submission
from nicps.job.tasks import Tasks
from nicps.job.text import one_line
from nicps.protocol import Phase, View

CANCEL_S = 60.0  # for the batch of a job that is cancelled to end, and the model to be saved
SWITCH_S = 3.0  # for a Linux switch that is heard to be ready, before training is decided on
_MOST_ERROR = 100  # characters: a decision must fit a frame


class Lead:
    """One job that this host leads: from the start, or since the former lead has left.

    Args:
        found: how far the job is, if another host has led before.

    Attributes: `training_s` and `handout_s`, the durations of these; `saved`, for the user, the path of the model after
    an alarm. `over`: this host leads no more, and messages that are on their way to the lead are dropped.
    """

    def __init__(
        self,
        plan: Plan,
        node: NodeInfo,
        tasks: Tasks,
        streams: Iterator[int],
        found: Found | None,
        now: float,
    ) -> None:
        self.plan = plan
        self.course = Course(plan, node, found)
        self.training_s = self.handout_s = 0.0
        self.saved = ""
        self.over = False
        self._node, self._tasks, self._streams = node, tasks, streams
        self._judged: dict[int, int] = {}  # of a group: the last round of each channel above 0
        self._mark = now
        self._cancel_at = math.inf  # the job is stopped then, whatever the batch's state
        self._awaited: Wait | None = None  # the wait for a Linux switch that ends at this time
        self._switch_by = math.inf

    @property
    def figures(self) -> dict[str, Any]:
        """The figures for the result."""
        return {
            "job_id": self.plan.job,
            "seconds": round(self.training_s, 3),
            "seconds_handout": round(self.handout_s, 3),
        }

    # ---- events

    def view_installed(self, view: View, keyed: bool) -> Orders:
        """Every member has installed a view that this host leads."""
        members = tuple(view.members[k - 1].name for k in view.order)
        orders: Orders = [PublishEvent("formed", {"members": members, "view": view.number})]
        if len(view.members) == 1:
            there = "with this key is there" if keyed else "is there"
            what = "runs the script" if self.plan.script else "trains"
            text = f"no other host {there}: this one {what} alone"
            orders.append(PublishEvent("warning", {"message": text}))
        orders += self.course.view_installed(view)
        # What was said of other channels holds in this view, too.
        for channel, round_ in self._judged.items():
            orders += self._go_on(channel, round_)
        return orders

    def hand_out_ended(self, now: float, phase: Phase) -> Orders:
        """A hand-out has ended here, and so everywhere."""
        orders: Orders = []
        if phase.settings["purpose"] == "job":
            self.handout_s = now - self._mark
            size = phase.settings["bytes"]
            orders = [PublishEvent("handed out", {"bytes": size, "seconds": self.handout_s})]
        return [*orders, *self.course.hand_out_ended(phase)]

    def model_built(self, now: float, part: Part | None) -> Orders:
        """The training program here may have built the model."""
        program = part.program if part is not None else None
        if program is None or not program.ready:
            return []
        self._mark = now
        choice = self.course.choice
        choice.channels = choice.channels or program.channels
        return self.course.model_built(program.fragments)

    def round_judged(self, now: float, round_: int, what: str, *, saves: bool = False) -> Orders:
        """R14, R15: the training program here has decided what follows a round."""
        if what == "end":
            self.training_s = now - self._mark
        return self.course.round_judged(round_, what, saves=saves)

    def channel_judged(self, channel: int, round_: int) -> Orders:
        """The same of a round of a group's channel above 0: the rounds of that channel go on.

        Hosts, plans and the end are decided on after a round of channel 0, when no round of another one is open.
        """
        self._judged[channel] = round_
        return self._go_on(channel, round_)

    def _go_on(self, channel: int, round_: int) -> Orders:
        rounds = self._node.rounds
        last = channel < len(rounds) and round_ == rounds[channel] - 1
        return [CommitNext(channel=channel)] if last and not self.course.stopping else []

    def decision_agreed(self, phase: Phase, answers: Mapping[int, bytes]) -> Orders:
        """Every member has acknowledged a decision."""
        try:
            sizes = {k: json.loads(answer) if answer else {} for k, answer in answers.items()}
            return self.course.decision_agreed(phase, sizes)
        except (ValueError, KeyError, TypeError) as error:
            return self.fail(f"a member's answer cannot be read: {error!r}")

    def fail(self, reason: str) -> Orders:
        """The job cannot go on; tell all members."""
        return [] if self.course.stopping else self.course.stop(one_line(reason))

    def cancel(self, now: float, name: str) -> Orders:
        """The user of that host cancels the job."""
        if self._cancel_at < math.inf or self.course.stopping:
            return []
        self._cancel_at = now + CANCEL_S
        log = Log(f"{name} cancels the job")
        return [log, *self.course.cancel(f"cancelled on {name}")]

    # ---- time

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        if self.course.stopping:
            return math.inf
        if self.course.choice.wait is not self._awaited:
            return -math.inf
        return min(self._cancel_at, self._switch_by)

    def tick(self, now: float) -> Orders:
        """A batch that does not end must not prevent the end of a cancelled job, nor a switch the begin of training."""
        wait = self.course.choice.wait
        if wait is not self._awaited:
            self._awaited = wait
            self._switch_by = now + SWITCH_S if wait is not None else math.inf
        if now < self.deadline():
            return []
        if now >= self._switch_by:
            return self.course.end_wait()
        self._cancel_at = math.inf
        return self.course.model_saved(f"the batch has not ended for {CANCEL_S:g} s")

    # ---- the course's orders

    def complete(self, phase: Phase, part: Part | None) -> Phase:
        """A decision with the job's name, and the digests that every member compares before it trains or tests.

        A host that was taken in before it had anything of the job learns the name from it.
        """
        if phase.kind not in (wire.PhaseKind.TRAIN, wire.PhaseKind.TEST, wire.PhaseKind.FINISH):
            return phase
        settings: dict[str, Any] = {"job": self.plan.job}
        if self.plan.script:
            settings |= {"script": True}
        if phase.kind is not wire.PhaseKind.FINISH:
            assert part is not None and part.program is not None
            settings |= {"handout": part.job.digest, "model": part.program.digest}
        if phase.kind is wire.PhaseKind.TRAIN:
            assert part is not None
            failed = self.course.choice.keeps_failed(part.switch_failed)
            if failed and phase.exchange is not Exchange.LINUX_SWITCH:
                settings |= {"switch_failed": True}
            if self.course.choice.doubted:
                settings |= {"doubted": True}
            phase = replace(phase, rest=part.rest)
        return replace(phase, settings=settings)

    def open_hand_out(
        self, now: float, purpose: str, part: Part | None, submission: Submission | None
    ) -> Orders:
        """Prepare a hand-out."""
        if purpose == "state":
            return [SaveState(Saving.STATE)]
        if purpose == "files":
            assert part is not None
            return [self._open(purpose, Folder.WORK, part.job.prepared["files"])]
        assert submission is not None
        self._mark = now
        told = self._find_unknown_hosts(submission.settings)
        told += [PublishEvent("warning", {"message": one_line(n)}) for n in submission.notes]
        told += [Log(f"branches: {submission.branches}")] if submission.branches else []
        return [*told, self._open(purpose, Folder.PREPARED, submission.files)]

    def _find_unknown_hosts(self, settings: Mapping[str, Any]) -> Orders:
        """Warn of a setting `slow.HOST` for a host that is not there, since it may be a slip."""
        names = [member.name for member in self._node.view.members]
        nobody = [key for key in settings if key.removeprefix("slow.") not in (key, *names)]
        if not nobody:
            return []
        text = f"nobody is slowed down by {', '.join(nobody)}: the hosts are {', '.join(names)}"
        return [PublishEvent("warning", {"message": one_line(text)})]

    def state_saved(self, saving: Saving, error: str, part: Part | None) -> Orders:
        """The training program here has written its state, or could not."""
        if saving is Saving.STATE:
            if error:
                return self.fail(f"the state cannot be handed out: {error}")
            return [self._open("state", Folder.WORK, [{"path": STATE, "store": "all"}])]
        if error or part is None or part.program is None:
            return self._model_saved(error)
        self.saved = part.checkpoints.describe(part.program.saved)
        return [part.checkpoints.keep_state(STATE, self._model_saved)]

    def _model_saved(self, error: str) -> Orders:
        return [] if self.over else self.course.model_saved(error[:_MOST_ERROR])

    def _open(self, purpose: str, folder: Folder, files: Any) -> Order:
        stream = next(self._streams)
        task = OpenStream(stream, folder, files)
        return self._tasks.begin(
            self, task, partial(self._opened, purpose, stream), partial(self._unopened, purpose)
        )

    def _opened(self, purpose: str, stream: int, now: float, size: StreamSize) -> Orders:
        return [CloseStream(stream)] if self.over else [OfferStream(purpose, stream, size)]

    def _unopened(self, purpose: str, now: float, reason: str) -> Orders:
        return [] if self.over else self.fail(f"cannot hand out the {purpose}: {reason}")
