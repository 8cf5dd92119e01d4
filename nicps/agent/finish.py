# SPDX-License-Identifier: Apache-2.0
"""The end of a job at a host: the program saves, what it leaves is kept, and the lead collects it (R14)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nicps import wire
from nicps.agent.bundle import OutStream
from nicps.agent.lives import earlier_files, keep_programs
from nicps.agent.metrics import METRICS, check_metrics
from nicps.errors import NicpsError
from nicps.protocol import Phase

if TYPE_CHECKING:
    from nicps.agent.job import LocalJob


class Finish:
    """What one host's part in a job has come to.

    Attributes: `expected` and `added`, fragments that the kernel must have added in the committed rounds, and has;
    `asked_again`, fragments sent again because the switch's sums of them had not come; `differed`, hosts whose weights
    were not the others'.
    """

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        self.expected = self.added = self.asked_again = 0
        self.differed: list[dict[str, Any]] = []
        self._turns_before = job.agent.frames.turns
        self._sent_again_before = job.agent.frames.sender.again
        self._answer: bytes | None = None  # to FINISH
        self._keeping = False  # the program has ended well
        self._names: list[str] = []

    def prepare(self, phase: Phase) -> None:
        """Let the program save and end; a second decision gets the same answer."""
        job = self._job
        node, program = job.agent.node, job.program
        if self._answer is not None:
            self._open()
            job.agent.prepared(phase.number, self._answer)
        elif program is None or not program.ready or node.number in node.learners:
            if program is not None:
                program.close("the job is done")
                job.program = None
            job.agent.prepared(phase.number, orjson.dumps({"bytes": 0, "index_bytes": 0}))
        elif program.has_ended:
            self.keep()
        else:
            program.enter(phase, 0, 0)

    def keep(self) -> None:
        """The program has ended well: its results go into the run's folder, once."""
        if self._keeping:
            return
        self._keeping = True
        job, facts, kept = self._job, self._facts(), self._kept
        last_round = job.agent.node.open_round
        names: list[str] = []

        def keep() -> None:
            names.extend(job.records.keep(job.folder / "out", job.base, facts, kept))
            keep_programs(job.base, kept)
            names.extend(earlier_files(kept))
            check_metrics(kept / METRICS, last_round)

        job.later(keep, lambda: self._are_kept(names))

    def _facts(self) -> dict[str, Any]:
        agent = self._job.agent
        return {
            "name": agent.node.name,
            "number": agent.node.number,
            "mac": wire.mac_text(agent.node.mac),
            "xdp_mode": agent.dataplane.mode,
            "rounds": self._job.train_rounds,
            "differed": self.differed,
            "fragments_added": self.added,
            "fragments_expected": self.expected,
            "fragments_sent_again": agent.frames.sender.again - self._sent_again_before,
            "sums_asked_again": self.asked_again,
            "token_turns": agent.frames.turns - self._turns_before,
            "counters": agent.dataplane.counters(),
        }

    @property
    def _kept(self) -> Path:
        agent = self._job.agent
        return agent.run_folder(self._job.id) / agent.node.name

    def _are_kept(self, names: list[str]) -> None:
        """The results are in the run's folder: tell the lead, if it asks now, how much there is to collect."""
        agent = self._job.agent
        self._names = names
        try:
            stream = self._open()
        except NicpsError as error:
            self._job.program_failed(str(error))
            return
        sizes = {"bytes": stream.size, "index_bytes": len(stream.index)}
        self._answer = orjson.dumps(sizes)
        phase = agent.node.phase
        if phase is not None and phase.kind is wire.PhaseKind.FINISH:
            agent.prepared(phase.number, self._answer)

    def _open(self) -> OutStream:
        """What was kept is handed out next."""
        files = [{"path": name, "store": "all"} for name in self._names]
        stream = OutStream(self._kept, files)
        self._job.handout.offer(stream)
        return stream
