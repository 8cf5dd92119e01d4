# SPDX-License-Identifier: Apache-2.0
"""The end of a job at a host: the program saves, its files are kept, and the lead collects them (R14)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nicps import wire
from nicps.job.accumulators import Memory
from nicps.job.actions import CloseStream
from nicps.job.handout import HandOut
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Acknowledge, Orders
from nicps.job.programs import Programs
from nicps.job.slow_work import Folder, KeepRecords, OpenStream, StreamSize
from nicps.job.tasks import Tasks
from nicps.protocol import Committed, Phase

_NOTHING = json.dumps({"bytes": 0, "index_bytes": 0}).encode()


@dataclass(slots=True)
class ServedTally:
    """What became of one host's steps, where there are parameter servers.

    Attributes: `pushes`, of its own training program; servers have `told` so many values of their staleness, with that
    sum, and the largest; `synchronisations` that it has seen.
    """

    pushes: int = 0
    told: int = 0
    staleness: int = 0
    stalest: int = 0
    synchronisations: int = 0

    def facts(self, system: str) -> dict[str, Any]:
        """For the run's result."""
        return {
            "system": system,
            "pushes": self.pushes,
            "synchronisations": self.synchronisations,
            "staleness": [self.told, self.staleness, self.stalest],
        }


class Finish:
    """The end of one host's part in a job.

    Args:
        owner: of the tasks.
        streams: numbers for streams.

    Attributes: `expected`, fragments that the kernel must have taken in the committed rounds; `asked_again`, fragments
    sent again because the switch's sums of them had not come; `exchanges`, training rounds by the exchange that made
    their sums; `differed`, hosts whose weights differed from the others'.
    """

    def __init__(
        self, node: NodeInfo, tasks: Tasks, owner: object, hand_out: HandOut, streams: Iterator[int]
    ) -> None:
        self._node, self._tasks, self._owner = node, tasks, owner
        self._hand_out, self._streams = hand_out, streams
        self.expected = self.asked_again = 0
        self.exchanges: Counter[str] = Counter()
        self.differed: list[dict[str, Any]] = []
        self._answer: bytes | None = None  # to FINISH
        self._served, self._serves = ServedTally(), False
        self._keeping = False  # the program has ended well
        self._names: Sequence[str] = ()
        self._opening = 0  # the stream that is being opened, or was opened last

    def note_commit(self, commit: Committed) -> None:
        """A round counts: the kernel has taken the others' fragments, or the switch's sums."""
        if commit.phase.kind is wire.PhaseKind.TRAIN and commit.counted:
            self.exchanges[commit.exchange.name] += 1
        if commit.phase.serving is not None:
            self._served.synchronisations += bool(commit.counted)
            self._serves = True
            part = commit.phase.serving.part_of(self._node.number, commit.fragments)
            self.expected += len(commit.counted) * len(part)
            return
        streams = commit.exchange.streams(commit.counted, self._node.number)
        self.expected += streams * commit.fragments

    def note_stepped(self, staleness: Sequence[int]) -> None:
        """Servers have added a step of this host's (S2), which was so stale at each of them."""
        served = self._served
        served.pushes += 1
        served.told += len(staleness)
        served.staleness += sum(staleness)
        served.stalest = max(served.stalest, *staleness, 0)

    @property
    def pushes(self) -> int:
        """Steps of this host that servers have added (S2)."""
        return self._served.pushes

    @property
    def kept(self) -> bool:
        """Whether the program's files are in the run's folder."""
        return self._answer is not None

    def acknowledge_nothing(self, phase: Phase) -> Orders:
        """Nothing at this host can be collected by the lead."""
        return [Acknowledge(phase.number, _NOTHING)]

    def begin(
        self,
        now: float,
        phase: Phase,
        programs: Programs,
        train_rounds: int,
        before: int,
        system: str,
    ) -> Orders:
        """Let the program save and end. A second decision gets the same answer. The rest is that of `keep`."""
        program, node = programs.current, self._node
        if self.kept:
            return self.open_records()
        blank = program is None or not program.ready or programs.is_blank(program)
        if program is None or blank or node.number in node.learners:
            ended = programs.end("the job is done")
            programs.current = None
            return [*ended, *self.acknowledge_nothing(phase)]
        if program.ended:
            return self.keep(train_rounds, before, system)
        return program.enter(now, phase, 0, Memory(), node)

    def keep(self, train_rounds: int, before: int, system: str) -> Orders:
        """The program has ended well: copy its files into the run's folder, once.

        Args:
            before: rounds of the run that this one goes on from.
            system: as the job's setting has it.
        """
        if self._keeping:
            return []
        self._keeping = True
        facts: dict[str, Any] = {
            "rounds": train_rounds,
            "rounds_before": before,
            "differed": self.differed,
            "fragments_expected": self.expected,
            "sums_asked_again": self.asked_again,
            "exchanges": dict(self.exchanges),
        }
        if self._serves:
            facts["served"] = self._served.facts(system)
        return [
            self._tasks.begin(self._owner, KeepRecords(facts, self._node.open_round), self._kept)
        ]

    def _kept(self, now: float, names: Sequence[str]) -> Orders:
        self._names = names
        return self.open_records()

    def open_records(self) -> Orders:
        """The kept files are handed out next; the answer to FINISH is their size."""
        self._opening = stream = next(self._streams)
        files = [{"path": name, "store": "all"} for name in self._names]
        task = OpenStream(stream, Folder.KEPT, files)
        return [self._tasks.begin(self._owner, task, partial(self._opened, stream))]

    def _opened(self, stream: int, now: float, size: StreamSize) -> Orders:
        """Tell the lead, if it asks now, the size of the files to collect."""
        if stream != self._opening:
            return [CloseStream(stream)]  # FINISH was decided again, and has another stream
        sizes = {"bytes": size.size, "index_bytes": size.index_bytes}
        self._answer = json.dumps(sizes).encode()
        orders = self._hand_out.offer(stream)
        phase = self._node.phase
        if phase is not None and phase.kind is wire.PhaseKind.FINISH:
            orders.append(Acknowledge(phase.number, self._answer))
        return orders
