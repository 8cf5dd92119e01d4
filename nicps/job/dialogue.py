# SPDX-License-Identifier: Apache-2.0
"""The messages of a training program (R8), and what follows from each at its host."""

from __future__ import annotations

from collections.abc import Sequence

from nicps import wire
from nicps.errors import JobFailed
from nicps.job.actions import RemoveState, ShareArena
from nicps.job.checkpoints import Checkpoints, resumed_from
from nicps.job.contribution import Contribution
from nicps.job.entry import Entry
from nicps.job.handed_job import HandedJob
from nicps.job.node_info import NodeInfo
from nicps.job.orders import (
    Fail,
    MarkRead,
    MarkReady,
    ModelBuilt,
    NeedRoom,
    Orders,
    Reported,
    RoundJudged,
    Saving,
    StateSaved,
)
from nicps.job.plan import read_plan
from nicps.job.program import Program
from nicps.job.programs import Programs
from nicps.job.served import ServedMemory
from nicps.job.steps import Steps
from nicps.job.text import one_line, shorten
from nicps.protocol import Offer
from nicps.protocol.plan import ChannelPlan
from nicps.session import shared_form as says
from nicps.session.served_form import Pull, Step
from nicps.session.shared_form import has_steps, is_planned, is_served


class Dialogue:
    """This host's side of it.

    Args:
        contributions: by channel.

    Attributes: `left`, a group's program has reported its end.
    """

    def __init__(
        self,
        node: NodeInfo,
        job: HandedJob,
        programs: Programs,
        entry: Entry,
        contributions: Sequence[Contribution],
        steps: Steps,
        served: ServedMemory,
        checkpoints: Checkpoints,
    ) -> None:
        self._node, self._job = node, job
        self._programs, self._entry = programs, entry
        self._contributions, self._steps = contributions, steps
        self._served, self._checkpoints = served, checkpoints
        self.left = False
        self._saving: Saving | None = None

    def handle_message(self, now: float, message: says.FromProgram) -> Orders:
        """Handle a message of the program.

        Raises:
            JobFailed: the message is not valid.
        """
        program = self._programs.current
        if program is None or program.ended:
            return []
        program.note_movement(now)
        match message:
            case says.Progress(round_, samples):
                return [] if program.lags else [MarkReady(round_, samples)]
            case says.Offer(round_, samples, unit, skip, conversion, channel):
                if program.lags:
                    return []  # the program will offer the round again
                program.note_offered(channel, round_)
                self._contributions[channel].begin(now, round_)
                return [Offer(round_, samples, unit, skip, conversion, channel)]
            case Step(round_, samples, skip) if not program.lags:
                self._contributions[0].begin(now, round_)
                return self._served.step(program, Offer(round_, samples, skip=skip))
            case Pull(round_):
                return self._served.pull(now, program, round_, self._entry.phase)
            case says.Read(round_, digest, channel):
                return self._read(now, program, round_, digest, channel)
            case says.Prepared(number):
                return self._prepared(program, number)
            case says.Ready(lanes, digest, channels) if not program.ready:
                plan = () if self._job.group else read_plan(self._job.settings, channels)
                return self._build(now, program, lanes, digest, plan)
            case says.Saved(number, round_, digest, error):
                if not program.note_state(number, digest):
                    return []
                program.saved = round_
                saving, self._saving = self._saving, None
                return [StateSaved(saving, one_line(error))] if saving is not None else []
            case says.Loaded(number, digest):
                if not program.note_state(number, digest):
                    return []
                self._job.has_state = False
                self._steps.forget_part()
                return [RemoveState(), *self._entry.enter_training(now)]
            case says.Checkpoint(round_, error):
                return self._checkpoints.write(round_, one_line(error))
            case says.Residual(error):
                return self._checkpoints.keep_residual(one_line(error))
            case says.Decide(round_, what, saves, channels, channel) if program.ready:
                plan = read_plan(self._job.settings, channels) if what == "plan" else ()
                if not channel:
                    program.note_judged(round_, what)
                self.left |= self._job.group and what == "end"
                return [RoundJudged(round_, what, saves, plan, channel)]
            case says.Report(values) if program.ready:
                return [Reported(values)]
            case says.Fail(reason):
                return [Fail(reason)]
            case _:
                return []

    def save(self, now: float, saving: Saving) -> Orders:
        """Let the program write its state; `StateSaved` follows."""
        program = self._programs.current
        if program is None or not program.ready or program.ended:
            return [StateSaved(saving, "there is no training program that could save")]
        self._saving = saving
        return program.change_state(now, "save", self._node)

    def forget_saving(self) -> None:
        """This host leads no more: the state is not waited for."""
        self._saving = None

    def _read(self, now: float, program: Program, round_: int, digest: str, channel: int) -> Orders:
        program.note_read(round_, digest, channel)
        read: Orders = [*self._steps.read(round_, digest)]
        rounds = self._node.rounds
        if channel < len(rounds) and round_ < rounds[channel]:
            read.append(MarkRead(round_, shorten(digest), channel))
        # The program may have reached the state that the next phase begins with.
        return [*read, *self._entry.enter_training(now)]

    def _prepared(self, program: Program, number: int) -> Orders:
        program.note_prepared()
        phase = self._entry.phase
        if phase is None or phase.number != number or phase.kind is wire.PhaseKind.FINISH:
            return []
        return self._entry.acknowledge(phase)

    def _build(
        self,
        now: float,
        program: Program,
        lanes: int,
        digest: str,
        channels: tuple[ChannelPlan, ...],
    ) -> Orders:
        settings = self._job.settings
        width = settings.get("lane", "i16")
        try:
            bits = int(str(width).removeprefix("i"))
            per_fragment = wire.lanes_per_fragment(bits)
        except (ValueError, KeyError):
            raise JobFailed(f"the job's lane is {width!r}, not i8, i16 or i32") from None
        program.note_ready(max(1, -(-lanes // per_fragment)), digest, channels)
        # The hosts add.
        self._served.lanes = lanes
        several = has_steps(settings) or is_planned(settings)
        alone = self._job.group or several or is_served(settings)
        room = [NeedRoom(program.fragments, bits)] if not alone else []
        arena = ShareArena(program.number, program.fragments, *resumed_from(self._job.prepared))
        return [arena, *room, *self._entry.enter_training(now), ModelBuilt()]
