# SPDX-License-Identifier: Apache-2.0
"""The course of a job, under its lead: hand out, train and test, take hosts back, collect, stop.

R5 to R7, R14, R15, R20 to R22. The starter's course begins with the hand-out. The lead of a later view has one too,
which begins where the job is. It repeats decisions of the former lead that were not carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nicps import wire
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job import plan as phases
from nicps.job.choice import Choice
from nicps.job.joiners import Joiners
from nicps.job.node_info import NodeInfo
from nicps.job.orders import (
    CallHosts,
    CommitNext,
    Decide,
    OpenHandOut,
    Orders,
    PublishEvent,
    RebuildView,
    SaveState,
    Saving,
)
from nicps.job.plan import Found, Plan
from nicps.protocol.actions import Answered
from nicps.protocol.phase import Phase
from nicps.protocol.view import View


class Course:
    """The lead's decisions. Every event returns the orders that follow from it.

    Args:
        found: how far the job is, if another host has led before.

    Attributes: `able`, this host has the whole job. `waits`, this host leads while the job is on its way to its disk:
    another course begins, and is told that the view is installed, once the host is `able` to lead.
    """

    def __init__(self, plan: Plan, node: NodeInfo, found: Found | None = None) -> None:
        self.plan = plan
        self.unit = plan.unit  # the next training round's, which the next phase begins with
        self.fragments = 0  # of a gradient, once the training program has told the model's size
        self._stop = found.stop if found is not None else None
        self.stopping = self._stop is not None
        self.choice = Choice(plan, node, found)
        self.joiners = Joiners(plan, node)
        self._unit_of = Exchange.BROADCAST  # the exchange that `unit` is for
        if found is not None and found.unit is not None:
            self.round_committed(found.unit, found.exchange)
        self._node = node
        self._begun = found is not None
        self.able = found is None or found.able
        self.waits = False
        self._trained = found is not None and found.trained
        self._finishing = found is not None and found.finishing
        self._crash = found.crash if found is not None else ""
        # The training program's last word; and whether it asks for a round after which it writes a checkpoint.
        self._decided: tuple[int, str, bool] | None = None
        self._collect: list[tuple[int, int, int]] = []  # member, bytes, bytes of the index
        self._collecting = False
        self._purpose = ""  # of the hand-out that is being prepared or is under way
        self._streaming = False  # it is being prepared
        self._opening = False  # training has been decided on, and is not agreed yet
        self._alarm: str | None = None  # the reason to save the model after the batch, and to stop
        self._cancelled = False  # a user has asked for that
        self._saving = False  # it is being saved

    # ---- events

    def view_installed(self, view: View) -> Orders:
        """Every member has installed a view that this host leads. Decisions that were not carried out are repeated."""
        self._opening = self._saving = False
        self.joiners.enter_view(view)
        remaining = len(view.live) / len(view.members)
        thin = remaining < self.plan.alarm_below and not self.plan.group
        if self._begun and thin and not self.stopping:
            left = view.names(set(range(1, len(view.members) + 1)) - view.live)
            self.raise_alarm(f"{left} left: {len(view.live)} of {len(view.members)} members remain")
        return [*self.joiners.call(stopping=self.stopping), *self._go_on_in(view)]

    def _go_on_in(self, view: View) -> Orders:
        node, phase = self._node, self._node.phase_in_force
        handing_out = phase is not None and phase.kind is wire.PhaseKind.HANDOUT
        over = phase is not None and handing_out and node.open_round > phase.last_round
        if self._stop is not None:
            return self._decide(self._stop)
        if not self._begun:
            self._begun = True
            return self._open_stream("job")
        if not self.able:
            if over and phase is not None and phase.settings["purpose"] == "job":
                self.waits = True  # a course that is able goes on
                return []
            if node.number in node.learners and not view.live <= node.learners:
                return [RebuildView(())]  # a member that has the state leads the next view
            lacks = "has the model's state" if node.learners else "has the whole job"
            lost = f"nobody is left who {lacks}"
            return self.stop(f"{self._crash}; {lost}" if self._crash else lost)
        if self._finishing:
            return self._finish()
        if self._streaming:
            return []  # `stream_opened` goes on
        if handing_out and phase is not None and not over:
            return self._lose_source() if phase.settings["source"] not in view.live else []
        if handing_out and self._purpose:
            return []  # the hand-out is over: `hand_out_ended` goes on
        if self._purpose:
            return self._hand_out_again()
        if phase is None or handing_out:
            return self._train()
        if phase.kind is wire.PhaseKind.TEST and not any(phase.shares):
            return self._test()
        if self.choice.has_failed(phase.exchange):
            return self._train(at_once=True)
        if told := self.choice.reconsider(phase):
            return told
        if phase.serving is not None and not view.live.issuperset(phase.serving.servers):
            return []  # `server_lost` goes on: another member takes its place
        if phase.serving is not None and not phase.sharing(view.live):
            return self._give_up("all hosts that trained have left")
        if self._decided is not None and self._decided[0] == node.open_round - 1:
            round_, what, saves = self._decided
            return self.round_judged(round_, what, saves=saves)
        return []  # the training program is going to judge the last round

    def stream_opened(self, purpose: str, source: int, size: int, index_bytes: int) -> Orders:
        """The stream that is handed out next is open (R5, R6)."""
        self._streaming = False
        if self.stopping:
            return []
        self._purpose = purpose
        node = self._node
        round_ = node.highest_round + 1
        return self._decide(
            self.plan.hand_out(node.view, round_, purpose, source, size, index_bytes)
        )

    def hand_out_ended(self, phase: Phase) -> Orders:
        """A hand-out has ended here, and so everywhere."""
        if self.stopping:
            return []
        purpose, self._purpose = phase.settings["purpose"], ""
        if purpose == "collect" and self._collecting:
            return self._collect_next()
        if purpose == "files":
            self.joiners.waiting.clear()  # their next answers say how far they have got
            # A group has no state that its agents know of; its members' programs wait for this.
            return self._train(self._node.learners if self.plan.group else frozenset())
        if purpose == "state":
            return self._train(self.joiners.learners(wire.Stage.WAITING))
        return self._finish() if self.plan.script else []

    def model_built(self, fragments: int) -> Orders:
        """The training program here knows the model's size: training may begin (R7)."""
        self.fragments = fragments
        phase = self._node.phase_in_force
        between = phase is None or phase.kind is wire.PhaseKind.HANDOUT
        if between and not self._trained and not self.stopping and not self._finishing:
            return self._train()
        return []

    def round_judged(self, round_: int, what: str, *, saves: bool = False) -> Orders:
        """The training program here has decided what follows a round: "continue", "test" or "end" (R14, R15).

        "more": the round was not the last one of its step.

        Args:
            saves: it will write a checkpoint after the next training round.
        """
        if self.stopping or self._finishing:
            return []
        self._decided = round_, what, saves
        phase = self._node.phase_in_force
        if round_ != self._node.open_round - 1 or not self._node.between_steps:
            return []  # repeated by a program that lags: it judges the later rounds yet, or steps
        if phase is not None and round_ < phase.first_round:
            return []  # decided on: the phase is what came of it
        self.choice.note_sum()
        if phase is not None and not self.choice.is_read(round_, phase):
            return []  # `read_by_all` comes here again, or `server_lost` goes on
        if self.plan.group:
            return self._group_judged(what, phase)
        if what == "more":
            # Hosts, alarms and checkpoints wait for the end of the step.
            return [] if self._streaming or self._opening or self._purpose else self._go_on()
        # Where training is being opened, the state is saved after the round that this begins with.
        if self._alarm is not None and phase is not None and not self._opening:
            self._saving = True
            return [SaveState(Saving.ALARM)]
        if what == "test":
            return self._test()
        if what == "end":
            return self._finish()
        if self._streaming or self._opening:
            return []  # an earlier round: hosts are taken back after the one that training goes on from
        if taken := self._take_back():
            return taken
        if phase is None or phase.kind is not wire.PhaseKind.TRAIN or what == "plan":
            return self._train()
        return self._train() if self.choice.improves(phase, self.fragments) else self._go_on()

    def read_by_all(self, round_: int) -> Orders:
        """With servers: all workers have read that round. What comes after it may be decided."""
        self.choice.read = round_
        if self._decided is None or self._decided[0] != round_:
            return []
        return self.round_judged(round_, self._decided[1], saves=self._decided[2])

    def server_lost(self, reads: Mapping[int, int]) -> Orders:
        """A server has left, and this is what each worker that is left has read last: one of them takes its place."""
        self.choice.reads = reads
        busy = self._streaming or self._opening or self._purpose  # training is opened anyway
        if self.stopping or self._finishing or self._saving or busy:
            return []
        return self._train()

    def _group_judged(self, what: str, phase: Phase | None) -> Orders:
        """The same for a group's program: "continue", "admit", "plan" or "end"."""
        if what == "end":
            return self.stop(None)
        if self._streaming or self._opening or self._purpose:
            return []  # hosts are being taken in: the decision that follows opens the next round
        if what == "admit" and (taken := self._take_back()):
            return taken
        trains = phase is not None and phase.kind is wire.PhaseKind.TRAIN
        return self._go_on() if trains and what != "plan" else self._train()

    def round_committed(self, unit: int, exchange: Exchange) -> None:
        """A training round counts, in a phase with that exchange; `unit` is the next round's."""
        self._trained = True
        if not exchange.absolute:  # otherwise every round has its own unit
            self.unit, self._unit_of = unit, exchange

    def model_saved(self, error: str = "") -> Orders:
        """The model is saved, or `error` is the reason why not: stop (R22)."""
        if self._alarm is None or self.stopping:
            return []
        unsaved = f", and the model could not be saved: {error}" if error else ""
        return self.stop(self._alarm + unsaved, alarm=not self._cancelled, saved=not error)

    def decision_agreed(self, phase: Phase, answers: Mapping[int, Mapping[str, Any]]) -> Orders:
        """Every member has acknowledged a decision; `answers` by member."""
        self._opening = False
        if phase.kind is wire.PhaseKind.FINISH:
            self._collect = [
                (number, answer["bytes"], answer["index_bytes"])
                for number, answer in sorted(answers.items())
                if number != self._node.view.lead and answer["bytes"]
            ]
            self._collecting = True
            return self._collect_next()
        if phase.kind is wire.PhaseKind.TRAIN:
            refused = {k: a[phases.REFUSED] for k, a in answers.items() if phases.REFUSED in a}
            if refused:
                return self._go_on_without_stripes(refused)
            # A learner that has just been counted need not be called any more.
            begun: Orders = [] if self._trained else [PublishEvent("training", self.choice.chosen)]
            saves = self._decided is not None and self._decided[2]
            called = self.joiners.call(stopping=self.stopping)
            return [*called, *begun, *(self._go_on() if saves else [])]
        return []

    def host_answered(self, answer: Answered) -> Orders:
        """A host on standby wants to come back, or a new one to come in (R20)."""
        return self.joiners.note_answer(answer)

    def exchange_fails(self, exchange: Exchange) -> Orders:
        """There are no sums: the exchange is replaced from now on, and the round is run again.

        A report about a former phase, or a second one before the next phase is in force, changes nothing.
        """
        phase = self._node.phase_in_force
        if self.stopping or self._finishing or self._saving or self.choice.has_failed(exchange):
            return []
        if phase is None or phase.exchange != exchange:
            return []
        lacks = "the sums of stripes do not come: this network does not carry frames to one host,"
        if self.plan.group:
            return self.stop(f"{lacks} which a group needs")
        if self.plan.steps or self.plan.planned:
            keys = "priorities needs" if self.plan.planned else "rank and bucket_mb need"
            return self.stop(f"{lacks} which {keys}: submit the job without it")
        told = self.choice.give_up(exchange)
        if self._purpose:
            return told  # training is opened anyway, after the hand-out
        return [*told, *self._train(at_once=True)]

    def _go_on_without_stripes(self, refused: Mapping[int, str]) -> Orders:
        """These members' kernels take no frames of stripes, and their reasons; the phase in force has stripes."""
        if self.stopping or self._finishing:
            return []
        reason = f"{self._node.view.names(refused)}: {refused[min(refused)]}"
        if self.plan.group or self.plan.planned or self.plan.servers is not None:
            return self.stop(
                f"{reason}; {'a group' if self.plan.group else 'the job'} needs that program"
            )
        return [*self.choice.refuse_stripes(reason), *self._train()]

    def switch_changed(self) -> Orders:
        """The state of a Linux switch has changed: perhaps training waits for it."""
        switch = self._node.switch
        comes = switch.heard and switch.find_lack(self.fragments, self.plan.width)
        return [] if comes else self.end_wait()

    def end_wait(self) -> Orders:
        """The switch is ready, or training has waited long enough for it. Something else may have come before."""
        wait, self.choice.wait = self.choice.wait, None
        if wait is None or self._streaming or self._purpose or self._saving:
            return []  # training is opened after the hand-out; nothing is, once the model is saved
        return self._train(wait.joined)

    def raise_alarm(self, reason: str) -> None:
        """R22: at the end of the batch the model is saved, and all stand by."""
        self._alarm = self._alarm or reason

    def cancel(self, reason: str) -> Orders:
        """A user wants the job to end: after the batch, once the model is saved; at once before the first round.

        A job that is about to end does so.
        """
        if self.stopping or self._finishing or self._alarm is not None:
            return []
        self._cancelled = True
        if self.plan.group:
            return self.stop(reason)
        self.raise_alarm(reason)
        return [] if self._trained else self.stop(reason)

    # ---- decisions

    def stop(self, reason: str | None, *, alarm: bool = False, saved: bool = False) -> Orders:
        """End the job everywhere, well (`reason` is None) or not."""
        self.stopping = True
        cancelled = self._cancelled and reason is not None
        self._stop = phases.stop(reason, alarm=alarm, saved=saved, cancelled=cancelled)
        return self._decide(self._stop)

    def _decide(self, phase: Phase) -> Orders:
        self.choice.wait = None
        self._opening = phase.kind is wire.PhaseKind.TRAIN
        return [Decide(phase)]

    def _train(self, joined: frozenset[int] = frozenset(), *, at_once: bool = False) -> Orders:
        """Train (on), with all members but those that have no state yet; and with `joined`, which have just got it.

        Where the open round may be committed it must be decided `at_once`: the lead has not marked that round yet.
        """
        node, plan = self._node, self.plan
        if plan.script:
            return self._finish()
        if not self.fragments:
            return []  # `model_built` comes here again
        exchange = self.choice.make(self.fragments, joined, waits=not at_once)
        if exchange is None:
            return []  # `switch_changed` comes here again, or `end_wait`
        counted = (node.view.live - node.learners) | joined
        told = self.choice.explain(exchange, self.fragments)
        if self._unit_of.shared_step and not exchange.shared_step:
            # It was as coarse as gradients are large.
            self.unit, self._unit_of = plan.unit, exchange
        of = counted, self.fragments, self.unit, exchange
        try:
            serving, changed = self.choice.choose_servers(counted, self.fragments)
        except JobFailed as error:
            return self._give_up(str(error))
        channels = self.choice.channels
        phase = plan.training(node.view, node.highest_round + 1, *of, serving, channels)
        return [*told, *changed, *self._decide(phase)]

    def _go_on(self) -> Orders:
        """The open round, or the first one of a phase, may be committed."""
        if self._decided is None:
            return [CommitNext()]
        round_, what, saves = self._decided
        self._decided = round_, what, False
        return [CommitNext(saves)]

    def _test(self) -> Orders:
        view = self._node.view
        counted = view.live - self._node.learners
        return self._decide(phases.test_round(view, self._node.highest_round + 1, counted))

    def _finish(self) -> Orders:
        self._finishing, self._collecting = True, False
        closed = CallHosts(self.plan.job, calls=False, closed=True)
        return [closed, *self._decide(Phase(0, 0, wire.PhaseKind.FINISH))]

    def _collect_next(self) -> Orders:
        """Every member hands its records out to the lead, one after the other."""
        while self._collect:
            number, size, index_bytes = self._collect.pop(0)
            if number in self._node.view.live:
                return self.stream_opened("collect", number, size, index_bytes)
        return self.stop(None)

    # ---- taking hosts back (R20)

    def _take_back(self) -> Orders:
        """At the end of a batch; nothing if no host waits."""
        if joiners := self.joiners.outside():
            self._purpose = "state"
            names = [joiner.name for joiner in joiners]
            # `view_installed` goes on
            return [PublishEvent("taking back", {"members": tuple(names)}), RebuildView(joiners)]
        if self.joiners.learners(wire.Stage.NOTHING) or self.joiners.learners(wire.Stage.WAITING):
            return self._give()
        return []

    def _give(self) -> Orders:
        """Hand the files to a learner that has nothing, and the state to one that waits for it."""
        if self.joiners.learners(wire.Stage.NOTHING):
            return self._open_stream("files")
        if waiting := self.joiners.learners(wire.Stage.WAITING):
            if not self.plan.group:
                return self._open_stream("state")
            self._purpose = ""
            return self._train(waiting)
        self._purpose = ""
        return self._train()

    def _open_stream(self, purpose: str) -> Orders:
        self._purpose, self._streaming = purpose, True
        return [OpenHandOut(purpose)]

    # ---- decisions that a change of the view has interrupted

    def _hand_out_again(self) -> Orders:
        """Whether a hand-out was decided, and has not begun."""
        return self._open_stream("job") if self._purpose == "job" else self._give()

    def _give_up(self, reason: str) -> Orders:
        """There are no servers, or no workers: the job is saved, and stopped."""
        if not self._trained:
            return self.stop(reason)
        self.raise_alarm(reason)
        self._saving = True
        return [SaveState(Saving.ALARM)]

    def _lose_source(self) -> Orders:
        """Whether the source of a hand-out has left in the middle of it."""
        self._purpose = ""
        return self._train()
