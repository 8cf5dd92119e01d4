# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one host, of a job that may have to be resumed: after an alarm, or without a majority (R18,
R22).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nicps.job.actions import BeginTask, Post
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Orders, ShowTrouble, Warn
from nicps.job.program import Program
from nicps.job.slow_work import KeepCheckpoint, KeepResidual
from nicps.job.tasks import Tasks
from nicps.job.text import is_run_name
from nicps.session.shared_form import Keep

STATE = "state.npz"  # between members (R20)
CHECKPOINT = "checkpoint.npz"  # for after an alarm (R22)
_ANSWER_LIMIT_S = 60.0  # for the training program, which may be in the middle of a micro-batch


def resumed_from(prepared: Mapping[str, Any]) -> tuple[str, str]:
    """The run that a prepared job goes on from, and the digest of its state; empty if there is none."""
    found = prepared.get("resume")
    if not isinstance(found, dict):
        return "", ""
    run, state = found.get("run"), found.get("state")
    if isinstance(run, str) and isinstance(state, str) and is_run_name(run):
        return run, state
    return "", ""


def rounds_before(prepared: Mapping[str, Any]) -> int:
    """The rounds that were committed before a prepared job begins, in the runs that it goes on from."""
    found = prepared.get("resume")
    rounds = found.get("rounds") if isinstance(found, dict) else 0
    return rounds if isinstance(rounds, int) and rounds > 0 else 0


class Checkpoints:
    """A host's checkpoints of one job.

    Args:
        owner: of the tasks.
        folder: the folder of the checkpoints, for the user.
    """

    def __init__(self, node: NodeInfo, tasks: Tasks, owner: object, folder: str) -> None:
        self._node, self._tasks, self._owner = node, tasks, owner
        self.folder = folder
        self._cut = ""  # why no host may go on here, until the user is told
        self._until = 0.0

    def describe(self, rounds: int) -> str:
        """For the user: the path of the checkpoint with the state after so many rounds of training."""
        return f"saved after {rounds} rounds of training in {self.folder}"

    def keep_state(self, name: str, then: Callable[[str], Orders]) -> BeginTask:
        """Keep the file that the program saved under that name; `then` takes an error, or an empty text."""

        def failed(now: float, error: str) -> Orders:
            return [Warn(f"no checkpoint in {self.folder}: {error}"), *then(error)]

        return self._tasks.begin(self._owner, KeepCheckpoint(name), lambda now, _: then(""), failed)

    def write(self, rounds: int, error: str) -> Orders:
        """The program has written a checkpoint, with the state after so many rounds of training; or it could not."""
        if error:
            return self._show_outcome(error)
        return [self.keep_state(CHECKPOINT, lambda error: self._show_outcome(error, rounds))]

    def keep_residual(self, error: str) -> Orders:
        """The program has written its residual; or `error` is the reason why it has not, or why the former one is
        dropped.
        """

        def failed(now: float, error: str) -> Orders:
            return [Warn(f"no residual in {self.folder}: {error}")]

        if error:
            return [Warn(error)]
        return [self._tasks.begin(self._owner, KeepResidual(), lambda now, _: [], failed)]

    # ---- no majority (R18)

    def save_without_majority(self, now: float, reason: str, program: Program | None) -> Orders:
        """No host may train on here, and perhaps the others never come back: save the state, and tell the user.

        The phase goes on, in case the others are heard again.
        """
        self._cut, self._until = reason, now + _ANSWER_LIMIT_S
        if program is None or program.ended or not program.holds_state:
            return self._show_outcome("this host has no training program with the job's state")
        if self._node.number in self._node.learners:
            return self._show_outcome("this host has not got the others' state yet")
        return [Post(program.number, Keep())]

    def note_majority(self) -> None:
        """There is a majority again, or it has gone on without this host."""
        self._cut = ""

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return self._until if self._cut else math.inf

    def tick(self, now: float) -> Orders:
        """A program that does not answer must not delay the message to the user."""
        if not self._cut or now < self._until:
            return []
        return self._show_outcome(
            f"the training program has not answered for {_ANSWER_LIMIT_S:g} s"
        )

    def _show_outcome(self, error: str, rounds: int = 0) -> Orders:
        reason, self._cut = self._cut, ""
        if not reason:
            return []
        what = f"not saved: {error}" if error else self.describe(rounds)
        return [ShowTrouble(f"{reason}; {what}", hook=True)]
