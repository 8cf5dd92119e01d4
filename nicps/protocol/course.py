# SPDX-License-Identifier: Apache-2.0
"""The course of a job, as its lead steers it: hand out, train and test, take hosts back, collect, stop.

R5 to R7, R14, R15, R20 to R22. The starter's course begins with the hand-out. Whoever leads a later view has one too,
which begins where the job is; what the lead before it had decided and nobody has carried out is decided again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Answered, Joiner
from nicps.protocol.phase import Phase, equal_shares
from nicps.protocol.view import View

DEFAULT_UNIT = -40  # sums to 1.3e5 fit lanes of any width, with steps of 1e-12 at the fine end
DEFAULT_QUORUM = 0.9  # R13
DEFAULT_ALARM = 0.5  # R22


@dataclass(frozen=True, slots=True)
class Plan:
    """What the job's settings fix.

    `alarm_below`: with fewer members than this part of those that began, the job is saved and stopped (R22).
    `admit`: hosts that were not there at the start may come in (R20). `redeal`: every host has all files; otherwise
    nobody can hand them out a second time. `exchange`: that of training rounds.
    """

    job: str
    batch: int
    width: int
    quorum: float = DEFAULT_QUORUM
    unit: int = DEFAULT_UNIT
    alarm_below: float = DEFAULT_ALARM
    admit: bool = False
    redeal: bool = True
    exchange: Exchange = Exchange.BROADCAST

    @classmethod
    def of(cls, job: str, settings: Mapping[str, Any], exchange: Exchange) -> Plan:
        """Out of a prepared job's settings, and the lead's own."""
        return cls(
            job,
            int(settings["batch"]),
            int(str(settings.get("lane", "i16")).removeprefix("i")),
            float(settings.get("quorum", DEFAULT_QUORUM)),
            int(settings.get("unit", DEFAULT_UNIT)),
            float(settings.get("alarm_below", DEFAULT_ALARM)),
            bool(settings.get("admit", False)),
            bool(settings.get("redeal", True)),
            exchange,
        )


class Steered(Protocol):
    """The host that leads. What takes time ends in a call of the course."""

    @property
    def view(self) -> View:
        """In force here."""

    @property
    def learners(self) -> frozenset[int]:
        """Members that have no state yet."""

    @property
    def open_round(self) -> int:
        """The round that is open here."""

    @property
    def phase(self) -> Phase | None:
        """In force here."""

    def decide(self, phase: Phase) -> None:
        """Let all prepare; ends in `agreed` (and, in a hand-out, `handed_out`)."""

    def go_on(self) -> None:
        """The next round may be committed."""

    def rebuild(self, joiners: tuple[Joiner, ...]) -> None:
        """Take hosts into the view; ends in `ready`."""

    def call_back(self, job: str) -> None:
        """Call standby hosts from now on, if `job` is not empty."""

    def stream(self, purpose: str) -> None:
        """Get ready what is to be handed out, "job", "files" or "state"; ends in `streamed`."""

    def windows(self, size: int) -> tuple[int, int, int]:
        """Into how many rounds so many bytes go; fragments of each, and of the last."""

    def check(self) -> Mapping[str, str]:
        """Digests that every member compares with its own before it trains: hand-out and model."""

    def save(self) -> None:
        """Save the model before the alarm; ends in `saved`."""

    def tell(self, event: str, **values: Any) -> None:
        """To whoever watches the job."""


@dataclass(frozen=True, slots=True)
class Found:
    """How far the job is at a host that takes the lead over.

    `able`: it has the job's files. `trained`: its training program has committed rounds, and tells again what is to
    come after the last. `finishing`: the end has been decided already. `unit`: the next training round's, once one has
    counted; `exchange`: that of the phase in which it has. `crash`: what ended this host's last training program, if
    one has crashed.
    """

    able: bool
    trained: bool
    finishing: bool
    unit: int | None = None
    exchange: Exchange = Exchange.BROADCAST
    crash: str = ""


class Course:
    """The lead's decisions.

    Args:
        found: how far the job is, where another has led before.

    Attributes: `waits`, this host leads and the job is on its way to its disk: another course is to begin, and be told
    that the view is `ready`, once it is `able` to lead.
    """

    def __init__(self, plan: Plan, host: Steered, found: Found | None = None) -> None:
        self.plan = plan
        self.unit = plan.unit  # the next training round's, which the next phase begins with
        self.fragments = 0  # of a gradient, once the training program has told the model's size
        self.stopping = False
        self.exchange = plan.exchange  # as long as it makes sums
        self._unit_of = Exchange.BROADCAST  # the exchange that `unit` is for
        if found is not None and found.unit is not None:
            self.committed(found.unit, found.exchange)
        self._host = host
        self._begun = found is not None
        self.able = found is None or found.able
        self.waits = False  # until this host has stored what was handed out
        self._trained = found is not None and found.trained
        self._finishing = found is not None and found.finishing
        self._crash = found.crash if found is not None else ""
        self._decided: tuple[int, str] | None = None  # the training program's last word
        self._collect: list[tuple[int, int, int]] = []  # member, bytes, bytes of the index
        self._collecting = False
        self._waiting: dict[bytes, Answered] = {}  # who wants to come back
        self._refused: set[bytes] = set()  # and cannot
        self._purpose = ""  # of the hand-out that is being got ready or is under way
        self._streaming = False  # it is being got ready
        self._opening = False  # training has been decided on, and is not agreed yet
        self._alarm: str | None = None
        self._stop: Phase | None = None

    # ---- what has happened

    def ready(self, view: View, phase: Phase | None) -> None:
        """Everybody has installed a view that this host leads. What nobody has carried out is decided again."""
        host = self._host
        self._opening = False
        self._call_back()
        self._waiting = {
            mac: answer
            for mac, answer in self._waiting.items()
            if view.number_of(mac) in host.learners
        }
        remaining = len(view.live) / len(view.members)
        if self._begun and remaining < self.plan.alarm_below and not self.stopping:
            left = view.names(set(range(1, len(view.members) + 1)) - view.live)
            self.alarm(f"{left} left: {len(view.live)} of {len(view.members)} members remain")
        handing_out = phase is not None and phase.kind is wire.PhaseKind.HANDOUT
        over = phase is not None and handing_out and host.open_round > phase.last_round
        if self._stop is not None:
            self._decide(self._stop)
        elif not self._begun:
            self._begun = True
            self._stream("job")
        elif not self.able and over and phase is not None and phase.settings["purpose"] == "job":
            self.waits = True  # a course of who is able goes on
        elif not self.able:
            knows = "has the model's state" if host.learners else "has the whole job"
            lost = f"nobody is left who {knows}"
            self.stop(f"{self._crash}; {lost}" if self._crash else lost)
        elif self._finishing:
            self._finish()
        elif self._streaming:
            pass  # `streamed` goes on
        elif handing_out and phase is not None and not over:
            if phase.settings["source"] not in view.live:
                self._lost()
        elif handing_out and self._purpose:
            pass  # it is over: `handed_out` goes on
        elif self._purpose:
            self._again()
        elif phase is None or handing_out:
            self._resume()
        elif phase.kind is wire.PhaseKind.TEST and not any(phase.shares):
            self._test()
        elif phase.exchange != self.exchange and self.exchange == Exchange.BROADCAST:
            self._resume()
        elif self._decided is not None and self._decided[0] == host.open_round - 1:
            self.decided(*self._decided)
        elif not self._trained:
            host.go_on()

    def streamed(self, purpose: str, source: int, size: int, index_bytes: int) -> None:
        """What is to be handed out is ready (R5, R6)."""
        self._streaming = False
        if self.stopping:
            return
        host = self._host
        self._purpose = purpose
        rounds, fragments, last = host.windows(size)
        self._decide(
            Phase(
                number=0,
                generation=0,
                kind=wire.PhaseKind.HANDOUT,
                first_round=host.open_round + 1,
                rounds=rounds,
                fragments=fragments,
                last_fragments=last,
                shares=tuple(int(m.number == source) for m in host.view.members),
                quorum=1,
                settings={
                    "job": self.plan.job,
                    "source": source,
                    "bytes": size,
                    "index_bytes": index_bytes,
                    "purpose": purpose,
                },
            )
        )

    def handed_out(self, phase: Phase) -> None:
        """A hand-out has ended here, and so everywhere."""
        if self.stopping:
            return
        purpose, self._purpose = phase.settings["purpose"], ""
        if purpose == "collect" and self._collecting:
            self._collect_next()
        elif purpose == "files":
            self._waiting.clear()  # they tell how far they have got when they are called next
            self._resume()
        elif purpose == "state":
            self._resume(counted=self._learners(wire.Stage.WAITING))

    def program_ready(self, fragments: int) -> None:
        """The training program here knows the model's size: training may begin (R7)."""
        self.fragments = fragments
        phase = self._host.phase
        between = phase is None or phase.kind is wire.PhaseKind.HANDOUT
        if between and not self._trained and not self.stopping and not self._finishing:
            self._resume()

    def decided(self, round_: int, what: str) -> None:
        """R14, R15: the training program here has looked at the round."""
        if self.stopping or self._finishing:
            return
        self._decided = round_, what
        self._trained = True
        phase = self._host.phase
        if round_ != self._host.open_round - 1:
            return  # said again by who has taken the lead over, and lags: it will look at the later ones
        if phase is not None and round_ < phase.first_round:
            return  # decided on: the phase is what came of it
        if self._alarm is not None:
            self._host.save()
        elif what == "test":
            self._test()
        elif what == "end":
            self._finish()
        elif self._streaming or self._opening:
            pass  # a round before the one that training goes on from: its end is the time to take hosts back
        elif self._take_back():
            pass
        elif phase is not None and phase.kind is wire.PhaseKind.TRAIN:
            self._host.go_on()
        else:
            self._resume()

    def committed(self, unit: int, exchange: Exchange) -> None:
        """A training round counts, in a phase with that exchange; `unit` is the next one's."""
        self.unit, self._unit_of = unit, exchange

    def saved(self, error: str = "") -> None:
        """The model is safe, or `error` says why it is not: stop (R22)."""
        if self._alarm is not None and not self.stopping:
            unsaved = f", and the model could not be saved: {error}" if error else ""
            self.stop(self._alarm + unsaved, alarm=True, saved=not error)

    def agreed(self, phase: Phase, answers: Mapping[int, Mapping[str, int]]) -> None:
        """Everybody has acknowledged a decision; `answers` by member."""
        self._opening = False
        if phase.kind is wire.PhaseKind.FINISH:
            self._collect = [
                (number, answer["bytes"], answer["index_bytes"])
                for number, answer in sorted(answers.items())
                if number != self._host.view.lead and answer["bytes"]
            ]
            self._collecting = True
            self._collect_next()
        elif phase.kind is wire.PhaseKind.TRAIN:
            self._call_back()  # who has just been counted need not be called any more
            if not self._trained:
                self._host.tell("training")

    def answered(self, answer: Answered) -> None:
        """A host on standby wants to come back, or a new one to come in (R20)."""
        room = self.plan.admit and len(self._host.view.members) < wire.MAX_MEMBERS
        joiner = answer.joiner
        if not answer.number and not room:
            return
        if self.plan.redeal or answer.stage is not wire.Stage.NOTHING:
            self._waiting[joiner.mac] = answer
        elif joiner.mac not in self._refused:
            self._refused.add(joiner.mac)
            self._host.tell(
                "warning",
                message=f"{joiner.name} is not taken back: it has none of the job's files, and nobody has all of them "
                "(redeal is off)",
            )

    def not_added(self) -> None:
        """The switch makes no sums: the hosts do it from now on, and run the round again."""
        if self.stopping or self._finishing:
            return
        if self.exchange != Exchange.BROADCAST:
            self.exchange = Exchange.BROADCAST
            self._host.tell(
                "warning",
                message="the switch does not add what it is sent: the hosts do it from now on",
            )
        self._resume()

    def alarm(self, reason: str) -> None:
        """R22: at the end of the batch the model is saved, and all stand by."""
        self._alarm = self._alarm or reason

    # ---- decisions

    def stop(self, reason: str | None, *, alarm: bool = False, saved: bool = False) -> None:
        """End the job everywhere, well (`reason` is None) or not."""
        self.stopping = True
        settings = {"ok": reason is None, "message": reason or "", "alarm": alarm, "saved": saved}
        self._stop = Phase(0, 0, wire.PhaseKind.STOP, settings=settings)
        self._decide(self._stop)

    def _decide(self, phase: Phase) -> None:
        self._opening = phase.kind is wire.PhaseKind.TRAIN
        self._host.decide(phase)

    def _resume(self, counted: frozenset[int] = frozenset()) -> None:
        """Train (on), with all members but those that have no state yet; and with these, who have just got it."""
        host, plan = self._host, self.plan
        if not self.fragments:
            return  # `program_ready` comes here again
        full = (host.view.live - host.learners) | counted
        exchange = self.exchange.among(len(host.view.live))
        if (
            self._unit_of.shared_step and not exchange.shared_step
        ):  # as coarse as gradients are large
            self.unit, self._unit_of = plan.unit, exchange
        batch = max(plan.batch, len(full))  # who has no share is not counted
        self._decide(
            Phase(
                number=0,
                generation=0,
                kind=wire.PhaseKind.TRAIN,
                first_round=host.open_round + 1,
                fragments=self.fragments,
                last_fragments=self.fragments,
                width=plan.width,
                shares=equal_shares(batch, len(host.view.members), full),
                quorum=math.ceil(plan.quorum * batch - 1e-9),
                unit=self.unit,
                settings=host.check(),
                exchange=exchange,
            )
        )

    def _test(self) -> None:
        host = self._host
        shares = tuple(int(m.number in host.view.live - host.learners) for m in host.view.members)
        self._decide(
            Phase(
                number=0,
                generation=0,
                kind=wire.PhaseKind.TEST,
                first_round=host.open_round + 1,
                rounds=1,
                fragments=1,
                last_fragments=1,
                width=32,
                shares=shares,
                quorum=sum(shares),
                settings=host.check(),
            )
        )

    def _finish(self) -> None:
        self._finishing, self._collecting = True, False
        self._host.call_back("")
        self._decide(Phase(number=0, generation=0, kind=wire.PhaseKind.FINISH))

    def _collect_next(self) -> None:
        """Every member hands its records out to the lead, one after the other."""
        while self._collect:
            number, size, index_bytes = self._collect.pop(0)
            if number in self._host.view.live:
                self.streamed("collect", number, size, index_bytes)
                return
        self.stop(None)

    # ---- taking hosts back (R20)

    def _call_back(self) -> None:
        view, host = self._host.view, self._host
        missing = len(view.live) < len(view.members) or bool(host.learners) or self.plan.admit
        host.call_back(self.plan.job if missing and not self.stopping else "")

    def _learners(self, stage: wire.Stage) -> frozenset[int]:
        """Members without the state that have got so far."""
        stages = {
            self._host.view.number_of(mac): answer.stage for mac, answer in self._waiting.items()
        }
        return frozenset(k for k in self._host.learners if stages.get(k) is stage)

    def _take_back(self) -> bool:
        """At the end of a batch; whether there is anybody."""
        view = self._host.view
        joiners = tuple(
            answer.joiner
            for mac, answer in self._waiting.items()
            if view.number_of(mac) not in view.live
        )
        if joiners:
            self._purpose = "state"
            self._host.rebuild(joiners)  # `ready` goes on
            return True
        if self._learners(wire.Stage.NOTHING) or self._learners(wire.Stage.WAITING):
            self._give()
            return True
        return False

    def _give(self) -> None:
        """Who has nothing gets the files, who waits for it the state."""
        if self._learners(wire.Stage.NOTHING):
            self._stream("files")
        elif self._learners(wire.Stage.WAITING):
            self._stream("state")
        else:
            self._purpose = ""
            self._resume()

    def _stream(self, purpose: str) -> None:
        self._purpose, self._streaming = purpose, True
        self._host.stream(purpose)

    # ---- what a change of the view has interrupted

    def _again(self) -> None:
        """A hand-out was decided, and has not begun."""
        if self._purpose == "job":
            self._stream("job")
        else:
            self._give()

    def _lost(self) -> None:
        """Whoever handed out has left in the middle of it."""
        self._purpose = ""
        self._resume()
