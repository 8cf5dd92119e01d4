# SPDX-License-Identifier: Apache-2.0
"""The lead's side of a job: carries out what its course decides (R5 to R7, R14, R20 to R22), and makes the result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from nicps.agent.bundle import WINDOW_FRAGMENTS, OutStream, windows
from nicps.agent.checkpoints import STATE
from nicps.agent.program import one_line
from nicps.agent.report import PICTURE, Report
from nicps.agent.result import summarise
from nicps.errors import NicpsError
from nicps.protocol import Joiner, Phase, View
from nicps.protocol.course import Course, Found, Plan
from nicps.session.lanes import LaneFormat

if TYPE_CHECKING:
    from nicps.agent.agent import Agent


class Conductor:
    """Steers one job from this host, for as long as it leads: from the start, or since the lead before it has left.

    Attributes: `saved`, for the user, where the model is after an alarm.

    Args:
        source: opens what the starter hands out; None where another host has.
    """

    def __init__(
        self,
        agent: Agent,
        job_id: str,
        plan: Plan,
        source: Callable[[], OutStream] | None,
        found: Found | None,
    ) -> None:
        self.agent = agent
        self.job_id = job_id
        self.course = Course(plan, self, found)
        self.training_s = self.handout_s = 0.0
        self.saved = ""
        self._source = source
        self._mark = agent.now
        if found is not None and agent.job is not None:
            self.job_is_ready()

    # ---- what the agent tells

    def ready(self, view: View) -> None:
        """Everybody has installed a view that we lead."""
        members = tuple(view.members[k - 1].name for k in view.order)
        self.tell("formed", members=members, view=view.number)
        if len(view.members) == 1:
            there = "with this key is there" if self.agent.keys.keyed else "is there"
            self.tell("warning", message=f"no other host {there}: this one trains alone")
        self.course.ready(view, self.phase)

    def handed_out(self, phase: Phase) -> None:
        """A hand-out has ended here, and so everywhere."""
        if phase.settings["purpose"] == "job":
            self.handout_s = self.agent.now - self._mark
            self.tell("handed out", bytes=phase.settings["bytes"], seconds=self.handout_s)
        self.course.handed_out(phase)

    def job_is_ready(self) -> None:
        """The training program here has built the model."""
        job = self.agent.job
        if job is not None and job.program is not None and job.program.ready:
            self._mark = self.agent.now
            self.course.program_ready(
                LaneFormat(job.program.lanes, self.course.plan.width).fragments
            )

    def decided(self, round_: int, what: str) -> None:
        """R14, R15: the training program here has looked at the round."""
        if what == "end":
            self.training_s = self.agent.now - self._mark
        self.course.decided(round_, what)

    def agreed(self, phase: Phase, answers: Mapping[int, bytes]) -> None:
        """Everybody has acknowledged a decision."""
        try:
            sizes = {k: orjson.loads(answer) if answer else {} for k, answer in answers.items()}
            self.course.agreed(phase, sizes)
        except (ValueError, KeyError, TypeError) as error:
            self.fail(f"a member's answer cannot be read: {error!r}")

    def fail(self, reason: str) -> None:
        """The job cannot go on; everybody is told."""
        if not self.course.stopping:
            self.course.stop(one_line(reason))

    # ---- Steered: what the course asks for

    @property
    def view(self) -> View:
        """In force here."""
        return self.agent.node.view

    @property
    def learners(self) -> frozenset[int]:
        """Members that have no state yet."""
        return self.agent.node.learners

    @property
    def open_round(self) -> int:
        """The round that is open here."""
        return self.agent.node.open_round

    @property
    def phase(self) -> Phase | None:
        """In force here."""
        ring = self.agent.node.ring
        return ring.phase if ring is not None else None

    def decide(self, phase: Phase) -> None:
        """`Node.decide`"""
        self.agent.act(self.agent.node.decide(self.agent.now, phase))

    def go_on(self) -> None:
        """`Node.go_on`"""
        self.agent.act(self.agent.node.go_on(self.agent.now))

    def rebuild(self, joiners: tuple[Joiner, ...]) -> None:
        """`Node.rebuild`"""
        self.tell("taking back", members=tuple(joiner.name for joiner in joiners))
        self.agent.act(self.agent.node.rebuild(self.agent.now, joiners))

    def call_back(self, job: str) -> None:
        """`Node.calls`"""
        self.agent.node.calls = job

    def windows(self, size: int) -> tuple[int, int, int]:
        """`bundle.windows`"""
        rounds, last = windows(size)
        return rounds, last if rounds == 1 else WINDOW_FRAGMENTS, last

    def stream(self, purpose: str) -> None:
        """Open what is to be handed out."""
        if purpose == "state":
            job = self.agent.job
            assert job is not None
            job.save(self._while_leading(self._saved))
            return
        try:
            if purpose == "job":
                assert self._source is not None
                self._mark = self.agent.now
                self._look_for_slow_hosts()
                self._offer(purpose, self._source)
            else:
                job = self.agent.job
                assert job is not None
                folder, files = job.folder, job.prepared["files"]
                self._offer(purpose, lambda: OutStream(folder, files))
        except (OSError, NicpsError, ValueError, KeyError, TypeError) as error:
            self.fail(f"cannot hand out the {purpose}: {error}")

    def _look_for_slow_hosts(self) -> None:
        """A setting `slow.HOST` for a host that is not there may be a slip."""
        submission, names = self.agent.submission, [m.name for m in self.view.members]
        settings = submission.prepared["settings"] if submission is not None else ()
        nobody = [k for k in settings if k.removeprefix("slow.") not in (k, *names)]
        if nobody:
            text = f"nobody is slowed down by {', '.join(nobody)}: the hosts are {', '.join(names)}"
            self.tell("warning", message=one_line(text))

    def _saved(self, error: str) -> None:
        """The training program here has written its state for those who come back."""
        job = self.agent.job
        assert job is not None
        try:
            if error:
                raise NicpsError(error)
            folder, files = job.folder, [{"path": STATE, "store": "all"}]
            self._offer("state", lambda: OutStream(folder, files))
        except NicpsError as problem:
            self.fail(f"the state cannot be handed out: {problem}")

    def _offer(self, purpose: str, source: Callable[[], OutStream]) -> None:
        job = self.agent.job or self.agent.begin_job(self.job_id)
        stream = source()
        job.handout.offer(stream)
        self.course.streamed(purpose, self.agent.node.number, stream.size, len(stream.index))

    def check(self) -> Mapping[str, str]:
        """What every member compares with its own before it trains."""
        job = self.agent.job
        assert job is not None and job.program is not None
        return {"handout": job.digest, "model": job.program.digest}

    def save(self) -> None:
        """Before the alarm: the model goes into the run's folder (R22)."""
        job = self.agent.job
        # A decision must fit a frame.
        kept = self._while_leading(lambda error: self.course.saved(error[:100]))
        if job is None or job.program is None:
            kept("there is no training program here")
            return
        checkpoints, program = job.checkpoints, job.program

        def written(error: str) -> None:
            if error:
                kept(error)
            else:
                self.saved = checkpoints.place(program.saved)
                checkpoints.keep(STATE, kept)

        job.save(written)

    def _while_leading(self, then: Callable[[str], None]) -> Callable[[str], None]:
        """What the training program has saved is for nothing if this host does not lead any more."""
        return lambda error: then(error) if self.agent.conductor is self else None

    def tell(self, event: str, **values: Any) -> None:
        """To the submitter and whoever else watches; a warning goes to the log too."""
        if event == "warning":
            self.agent.log(values["message"])
        self.agent.tell(event, self.job_id, **values)

    # ---- the end

    def result(
        self,
        names: list[str],
        extra: Mapping[str, Any],
        then: Callable[[dict[str, Any], str], None],
    ) -> None:
        """What the run has come to; result.json and the model are left in its folder.

        `then` gets the result, or why there is none. Long runs leave long records: it is made in the background.
        """
        agent, mine, last_round = self.agent, self.agent.node.name, self.open_round
        about = {
            "job_id": self.job_id,
            "seconds": round(self.training_s, 3),
            "seconds_handout": round(self.handout_s, 3),
        }
        result: dict[str, Any] = {}
        problems: list[str] = []

        def make() -> None:
            try:
                folder = agent.run_folder(self.job_id)
                about["report"] = str(folder / PICTURE)
                made = summarise(folder, names, last_round) | about | dict(extra)
                (folder / "result.json").write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2))
                model = folder / mine / "model.pt"
                if model.exists():
                    shutil.copyfile(model, folder / "model.pt")
                result.update(made)
            except (
                Exception
            ) as error:  # training programs wrote the records: anything can be in them
                problems.append(f"cannot make the summary of the run: {error}")

        agent.loop.background(make, lambda: then(result, "".join(problems)))

    def report(self, entry: str, then: Callable[[], None]) -> None:
        """Draw the run (a picture that fails fails nothing else)."""

        def drawn(error: str) -> None:
            if error:
                self.tell("warning", message=f"no report: {error}")
            then()

        Report(self.agent, self.agent.run_folder(self.job_id), entry, drawn).draw()
