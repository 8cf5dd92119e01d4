# SPDX-License-Identifier: Apache-2.0
"""A job's checkpoint at one host: what `nicps resume` goes on from after an alarm, or where no majority is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nicps.agent.records import keep_files
from nicps.session.shared_form import Keep

if TYPE_CHECKING:
    from nicps.agent.job import LocalJob

STATE = "state.npz"  # between members (R20)
CHECKPOINT = "checkpoint.npz"  # for after an alarm (R22)
_PATIENCE_S = 60.0  # for the training program, which may be in the middle of a micro-batch


class Checkpoints:
    """What one host keeps of a job that may have to be resumed."""

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        self._cut = ""  # why nobody may go on here, until the user has been told
        self._until = 0.0

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._job.agent.run_folder(self._job.id) / "checkpoint"

    def place(self, rounds: int) -> str:
        """For the user: where the one with the state after so many rounds of training is."""
        return f"saved after {rounds} rounds of training in {self.folder}"

    def keep(self, name: str, then: Callable[[str], None]) -> None:
        """Copy what the program saved into the run's folder, with what `nicps resume` needs beside it.

        `then` gets an error, or an empty text.
        """
        source, kept = self._job.folder, self.folder
        failed: list[str] = []

        def work() -> None:
            names = {"job.tar": "job.tar", "prepared.json": "prepared.json", name: CHECKPOINT}
            try:
                keep_files(source, kept, names)
            except OSError as error:
                about = f"{error.filename}: " if error.filename else ""
                failed.append(f"{about}{error.strerror}")

        def done() -> None:
            for error in failed:
                self._job.agent.warn(f"no checkpoint in {kept}: {error}")
            then("".join(failed))

        self._job.later(work, done)

    def written(self, rounds: int, error: str) -> None:
        """The program has written one, with the state after so many rounds of training; or it could not."""
        if error:
            self._tell(error)
        else:
            self.keep(CHECKPOINT, lambda error: self._tell(error, rounds))

    # ---- no majority (R18)

    def cut(self, reason: str) -> None:
        """Nobody may train on here, and perhaps the others never come back: save what there is, and tell the user.

        The phase goes on, in case they are heard again.
        """
        job = self._job
        node, program = job.agent.node, job.program
        self._cut, self._until = reason, job.agent.now + _PATIENCE_S
        if program is None or program.has_ended or not program.holds_state:
            self._tell("this host has no training program with the job's state")
        elif node.number in node.learners:
            self._tell("this host has not got the others' state yet")
        else:
            program.post(Keep())

    def called_off(self) -> None:
        """There is a majority again, or it has gone on without this host."""
        self._cut = ""

    def look(self, now: float) -> None:
        """A program that does not answer must not keep the user from being told."""
        if self._cut and now > self._until:
            self._tell(f"the training program has not answered for {_PATIENCE_S:g} s")

    def _tell(self, error: str, rounds: int = 0) -> None:
        reason, self._cut = self._cut, ""
        if reason:
            agent = self._job.agent
            what = f"not saved: {error}" if error else self.place(rounds)
            agent.views.say_trouble(f"{reason}; {what}")
            agent.endings.run_hook(agent.trouble)
