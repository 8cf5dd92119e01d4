# SPDX-License-Identifier: Apache-2.0
"""Node 1's side of a job (R1, R5 to R7, R14): prepare, form, hand out, train and test, collect, stop."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from nicps import wire
from nicps.agent.bundle import WINDOW_FRAGMENTS, OutStream, windows
from nicps.agent.job import new_job_id, working_folder
from nicps.agent.process import Child, python
from nicps.agent.result import summarise
from nicps.dataplane.lanes import LaneFormat
from nicps.errors import NicpsError
from nicps.protocol import NodeState, Phase
from nicps.protocol.phase import equal_shares

if TYPE_CHECKING:
    from nicps.agent.agent import Agent

DEFAULT_UNIT = (
    -40
)  # 2**-40: sums to 1.3e5 fit lanes of any width, with steps of 1e-12 at the fine end
DEFAULT_QUORUM = 0.9  # R13
_REASON_CHARACTERS = 300  # of a failure; a decision must fit a frame


class Conductor:
    """Runs one submitted job to its end, whatever that is."""

    def __init__(self, agent: Agent, message: Mapping[str, Any]) -> None:
        self.agent = agent
        self.started = agent.now
        self.result: dict[str, Any] = {}
        self.job_id = ""
        self._reason: str | None = None
        self._stopping = False
        self._lanes = 0
        self._settings: dict[str, Any] = {}
        self._prepared: dict[str, Any] = {}
        self._testing = False
        self.unit: int | None = None  # the last training round's, which the next phase begins with
        self._collect: list[tuple[int, int, int]] = []  # member, bytes, bytes of the index
        self._training_s = 0.0
        self._handout_s = 0.0
        self._mark = 0.0
        self._base = working_folder(agent.settings.work)
        self._folder = self._base / "prepared"
        self._folder.mkdir()
        os.chown(self._folder, agent.user.uid, agent.user.gid)
        self._message = dict(message)
        self._child: Child | None = None
        self._prepare()

    # ---- before anybody else hears of it

    def _prepare(self) -> None:
        """The user's code makes model and data, as the training user (R5)."""
        message = self._message
        arguments = ["prepare", "--job", message["job"], "--out", str(self._folder)]
        if message.get("data"):
            arguments += ["--data", message["data"]]
        settings = message.get("settings") or {}
        arguments += ["--settings", orjson.dumps(settings).decode()]
        entry = message.get("entry") or "trainer"
        self._child = self.agent.spawn(
            python(entry, *arguments),
            self._folder,
            self._base / "prepare.log",
            self._is_prepared,
            network_access=True,
        )

    def _is_prepared(self, code: int) -> None:
        child, self._child = self._child, None
        assert child is not None
        if code:
            self._reason = child.last_line()
            self._over()
            return
        try:
            self._prepared = orjson.loads((self._folder / "prepared.json").read_bytes())
            self._settings = self._prepared["settings"]
            self.job_id = new_job_id(str(self._prepared.get("job", "job")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._reason = f"the job's preparation left no usable prepared.json: {error}"
            self._over()
            return
        self.event("forming", data=self._prepared.get("data"))
        self.agent.act(self.agent.node.start(self.agent.now, wire_nonce()))

    def formed(self) -> None:
        """R3 is done: hand the work out (R5, R6)."""
        members = self.agent.node.members
        self.event("formed", members=[m.name for m in members], view=self.agent.node.view)
        if len(members) == 1:
            self.event("warning", message="no other host has joined: this one trains alone")
        try:
            job = self.agent.begin_job(self.job_id)
            job.outgoing = OutStream(self._folder, self._prepared["files"])
        except (OSError, NicpsError, KeyError, TypeError) as error:
            self.fail(str(error))
            return
        self._mark = self.agent.now
        self._decide_handout(1, job.outgoing.size, len(job.outgoing.index), "job")

    # ---- phases

    def _decide(self, phase: Phase) -> None:
        self.agent.act(self.agent.node.decide(self.agent.now, phase))

    def _decide_handout(self, source: int, size: int, index_bytes: int, purpose: str) -> None:
        node = self.agent.node
        rounds, last = windows(size)
        self._decide(
            Phase(
                number=0,
                generation=0,
                kind=wire.PhaseKind.HANDOUT,
                first_round=node.open_round + 1,
                rounds=rounds,
                fragments=min(WINDOW_FRAGMENTS, last if rounds == 1 else WINDOW_FRAGMENTS),
                last_fragments=last,
                width=0,
                shares=tuple(int(m.number == source) for m in node.members),
                quorum=1,
                settings={
                    "job": self.job_id,
                    "source": source,
                    "bytes": size,
                    "index_bytes": index_bytes,
                    "purpose": purpose,
                },
            )
        )

    def handed_out(self, phase: Phase, digest: str) -> None:
        """A hand-out has ended here, and so everywhere."""
        if self._stopping:
            return
        if phase.settings["purpose"] == "job":
            self._handout_s = self.agent.now - self._mark
            self.event("handed out", bytes=phase.settings["bytes"], seconds=self._handout_s)
        else:
            self._collect_next()

    def trainer_ready(self, lanes: int) -> None:
        """Node 1's own training program knows the model's size: training may begin (R7)."""
        self._lanes = lanes
        self._mark = self.agent.now
        self._decide_training()

    def _decide_training(self) -> None:
        node, settings, job = self.agent.node, self._settings, self.agent.job
        assert job is not None and job.ready is not None
        width = int(str(settings.get("lane", "i16")).removeprefix("i"))
        batch = int(settings["batch"])
        fragments = LaneFormat(self._lanes, width).fragments
        quorum = math.ceil(float(settings.get("quorum", DEFAULT_QUORUM)) * batch - 1e-9)
        self._testing = False
        self._decide(
            Phase(
                number=0,
                generation=0,
                kind=wire.PhaseKind.TRAIN,
                first_round=node.open_round + 1,
                fragments=fragments,
                last_fragments=fragments,
                width=width,
                shares=equal_shares(batch, node.members),
                quorum=quorum,
                unit=self.unit
                if self.unit is not None
                else int(settings.get("unit", DEFAULT_UNIT)),
                settings={"handout": job.digest, "model": job.ready["digest"]},
            )
        )

    def _decide_test(self) -> None:
        node, job = self.agent.node, self.agent.job
        assert job is not None and job.ready is not None
        self._testing = True
        self._decide(
            Phase(
                number=0,
                generation=0,
                kind=wire.PhaseKind.TEST,
                first_round=node.open_round + 1,
                rounds=1,
                fragments=1,
                last_fragments=1,
                width=32,
                shares=(1,) * len(node.members),
                quorum=len(node.members),
                settings={"handout": job.digest, "model": job.ready["digest"]},
            )
        )

    def decided(self, what: str) -> None:
        """R14, R15: node 1's training program has looked at the round."""
        if self._stopping:
            return
        if what == "test":
            self._decide_test()
        elif what == "end":
            self._training_s = self.agent.now - self._mark
            self._decide(Phase(number=0, generation=0, kind=wire.PhaseKind.FINISH))
        elif self._testing:
            self._decide_training()
        else:
            self.agent.act(self.agent.node.go_on(self.agent.now))

    def agreed(self, phase: Phase, answers: Mapping[int, bytes]) -> None:
        """Everybody has acknowledged a decision."""
        if phase.kind is wire.PhaseKind.FINISH:
            try:
                self._collect = [
                    (number, int(sizes["bytes"]), int(sizes["index_bytes"]))
                    for number, answer in sorted(answers.items())
                    if number != 1 and isinstance(sizes := orjson.loads(answer), dict)
                ]
            except (ValueError, KeyError, TypeError) as error:
                self.fail(f"a member does not say what there is to collect: {error!r}")
                return
            self._collect_next()
        elif phase.kind is wire.PhaseKind.STOP:
            self._over()
        elif phase.kind is wire.PhaseKind.TRAIN and self.unit is None:
            self.event("training")

    def _collect_next(self) -> None:
        """Every member hands its records out to node 1, one after the other."""
        if self._collect:
            number, size, index_bytes = self._collect.pop(0)
            self._decide_handout(number, size, index_bytes, "collect")
        else:
            self.stop(None)

    # ---- the end

    def fail(self, reason: str) -> None:
        """The job cannot go on; everybody is told."""
        if not self._stopping:
            self.stop(reason)

    def stop(self, reason: str | None) -> None:
        """End the job everywhere, well (`reason` is None) or not."""
        self._stopping, self._reason = True, reason
        self._kill_child()
        if self.agent.node.state is not NodeState.MEMBER:
            self._over()
            return
        plain = "".join(c if c.isprintable() else " " for c in reason or "")
        message = " ".join(plain.split())[:_REASON_CHARACTERS]
        settings = {"ok": reason is None, "message": message}
        self._decide(Phase(0, 0, wire.PhaseKind.STOP, settings=settings))

    def _over(self) -> None:
        """Everybody stands by: tell the submitter how it went."""
        agent = self.agent
        job = agent.job
        if self._reason is None and job is not None:
            try:
                self._summarise()
            except (
                Exception
            ) as error:  # records come from training programs: anything can be in them
                self._reason = f"cannot make the summary of the run: {error}"
        shutil.rmtree(self._base, ignore_errors=True)
        agent.release(self, self._reason)
        if self._reason is None:
            self._report(lambda: agent.job_is_over(self, None, self.result))
        else:
            agent.job_is_over(self, self._reason, {})

    def _summarise(self) -> None:
        folder = self.agent.run_folder(self.job_id)
        self.result = summarise(folder, [m.name for m in self.agent.node.members]) | {
            "data": self._prepared.get("data"),
            "job_id": self.job_id,
            "settings": self._settings,
            "seconds": round(self._training_s, 3),
            "seconds_handout": round(self._handout_s, 3),
            "report": str(folder / "report.html"),
        }
        (folder / "result.json").write_bytes(orjson.dumps(self.result, option=orjson.OPT_INDENT_2))
        model = folder / self.agent.node.name / "model.pt"
        if model.exists():
            shutil.copyfile(model, folder / "model.pt")

    def _report(self, then: Callable[[], None]) -> None:
        """Draw the run; it is the trainer's floor that can (a picture that fails fails nothing else)."""
        agent = self.agent
        folder = agent.run_folder(self.job_id)
        log = folder / "report.log"
        entry = self._message.get("entry") or "trainer"

        def done(code: int) -> None:
            if code:
                self.event("warning", message=f"no report: {child.last_line()}")
            else:
                log.unlink(missing_ok=True)
            then()

        child = agent.spawn(python(entry, "report", str(folder)), folder, log, done, as_owner=True)

    def event(self, what: str, /, **values: Any) -> None:
        """Tell the submitter and whoever else watches."""
        self.agent.publish(self, {**values, "op": "event", "event": what, "job_id": self.job_id})

    def abandon(self) -> None:
        """The agent stops: leave nothing behind."""
        self._kill_child()
        shutil.rmtree(self._base, ignore_errors=True)

    def _kill_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self.agent.unwatch(child.fileno())
            child.kill()


def wire_nonce() -> int:
    """64 random bits that name a formation."""
    return int.from_bytes(os.urandom(8), "big")
