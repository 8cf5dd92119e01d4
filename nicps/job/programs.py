# SPDX-License-Identifier: Apache-2.0
"""The training programs of a job at one host, one after the other: started, lost, started again (R8, R17)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nicps.errors import JobFailed
from nicps.job.actions import DropFragments, StartProgram
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Depart, Fail, Orders, Warn
from nicps.job.plan import is_group
from nicps.job.program import STALL_S, Program

_MOST_STARTS = 4  # of a program that is killed repeatedly before it has trained a round
_AWAY_S = 2.0  # between two ticks: then this agent has stood still itself
_TICK_S = 1.0


class Programs:
    """The present training program, and its processes.

    Args:
        numbers: for programs, of all jobs of this agent.

    Attributes: `current`, the last one that was started, even if it has ended. `crash`, the end of the last one that
    did not end well.
    """

    def __init__(self, node: NodeInfo, numbers: Iterator[int], now: float) -> None:
        self._node, self._numbers = node, numbers
        self.current: Program | None = None
        self.crash = ""
        self._starts = 0
        self._ticked = now

    @property
    def lacking(self) -> bool:
        """Whether no process is there."""
        return self.current is None or self.current.ended

    @property
    def restarted(self) -> bool:
        """Whether the current one has taken the place of one that was lost, and has not trained since."""
        return self._starts > 1

    @property
    def can_start(self) -> bool:
        """Whether another one may be started: they have not been killed repeatedly."""
        return self._starts < _MOST_STARTS

    def find(self, number: int) -> Program | None:
        """The current one, if it has that number and has not ended."""
        program = self.current
        there = program is not None and program.number == number and not program.ended
        return program if there else None

    @property
    def moment(self) -> str:
        """The round that the current one is in, for an error message."""
        program = self.current
        return program.describe_moment(self._node.open_round) if program is not None else ""

    def note_training(self) -> None:
        """The current one has trained a round."""
        self._starts = 1

    # ---- processes

    def start(self, now: float, entry: str, settings: Mapping[str, Any]) -> Orders:
        """Start one, in place of the current one."""
        orders = self.end("another one is started")
        self._starts += 1
        stall_s = settings.get("stall_s")
        if not isinstance(stall_s, int | float) or stall_s < 1:
            stall_s = STALL_S
        adopts = is_group(settings)
        self.current = Program(next(self._numbers), float(stall_s), now, patient=adopts)
        network_access = settings.get("network_access") is True
        return [*orders, StartProgram(self.current.number, entry, network_access, adopts)]

    def start_again(
        self, now: float, entry: str, settings: Mapping[str, Any], last: str = ""
    ) -> Orders:
        """The current one has been lost: start another, unless programs are lost repeatedly."""
        if self.can_start:
            return self.start(now, entry, settings)
        times = f"{_MOST_STARTS} times in a row, without a round in between"
        said = f"; the last time: {last}" if last else ""
        return self.fail(f"the training program was killed, or stood still, {times}{said}")

    def lose_of_group(self, last: str) -> Orders:
        """A group's program is gone: the others go on without this host, which cannot start another one."""
        program = self.current
        if program is None:
            return []
        if not program.attached and not program.ready:
            return self.fail(f"no program has joined the group here: {last}")
        self.crash = f"{self._node.name}: its program has left the group: {last}"
        return [DropFragments(), Depart(self.crash)]

    def is_blank(self, program: Program) -> bool:
        """Whether it has taken the place of one that was lost, and does not have that one's state."""
        return self.restarted and not program.holds_state

    def note_unstarted(self, number: int, reason: str) -> Orders:
        """A program that was to start has no process: its files are damaged, or there is no memory."""
        program = self.find(number)
        if program is None:
            return []
        program.ended = True
        again = "the training program cannot be started again: " if self._starts > 1 else ""
        return self.fail(f"{again}{reason}")

    def end(self, reason: str, *, saved: bool = False) -> Orders:
        """End the current one, in any state; `saved`: the job's state is saved."""
        return self.current.end(reason, saved=saved) if self.current is not None else []

    def fail(self, reason: str) -> Orders:
        """It cannot go on, and no other could. The lead names the host, as for a FAIL frame."""
        node = self._node
        return [Fail(f"{node.name}: {reason}" if node.leads else reason)]

    # ---- connections

    def attach(self, settings: Mapping[str, Any]) -> Orders:
        """The training program has connected.

        Raises:
            JobFailed: none is expected, or one is attached.
        """
        program = self._expected()
        program.attached = True
        return program.welcome(self._node, settings)

    def attach_gateway(self) -> int:
        """The training program speaks JSON: a gateway is started, which connects for it. The program's number.

        Raises:
            JobFailed: as `attach`.
        """
        program = self._expected()
        if program.gateway:
            raise JobFailed("a training program is attached already")
        program.gateway = True
        return program.number

    def detach(self, number: int) -> None:
        """It has closed its connection."""
        program = self.find(number)
        if program is not None:
            program.attached = False

    def _expected(self) -> Program:
        program = self.current
        if program is None or program.ended:
            raise JobFailed("no training program is expected yet")
        if program.attached:
            raise JobFailed("a training program is attached already")
        return program

    # ---- time

    def deadline(self, awaited: bool) -> float:
        """When `find_stall` wants to be called next."""
        program = self.current
        if program is None or program.ended:
            return math.inf
        return min(self._ticked + _TICK_S, program.silent_at(awaited))

    def find_stall(self, now: float, awaited: bool) -> tuple[str, Orders]:
        """Whether the program that others wait for does nothing: return why it was ended, or an empty text.

        Args:
            awaited: all members wait for the rest of its gradient.
        """
        away, self._ticked = now > self._ticked + _AWAY_S, now
        program = self.current
        if program is None or program.ended:
            return "", []
        if away or self._node.changing:  # then it waits for the network, perhaps for long (R18)
            program.note_movement(now)
        if now <= program.silent_at(awaited):
            return "", []
        silence = f"it has not moved for {program.silence_limit_s(awaited):g} s"
        reason = f"{silence} (the job's stall_s is {program.stall_s:g})"
        if program.duty in ("", "work", "judge") and len(self._node.view.live) == 1:  # alone
            program.note_movement(now)
            return "", [Warn(f"the training program: {reason}")]
        return reason, program.end(reason)
