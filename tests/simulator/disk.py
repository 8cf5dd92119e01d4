# SPDX-License-Identifier: Apache-2.0
"""What is slow at a simulated host: files, and the thread that does one task after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nicps.job.actions import BeginTask
from nicps.job.slow_work import (
    DrawReport,
    Folder,
    KeepCheckpoint,
    KeepRecords,
    MakeResult,
    OpenStream,
    ReserveAccumulators,
    Settle,
    Stored,
    StoreWindow,
    StreamSize,
    StripesRefused,
)
from nicps.wire import PAYLOAD_BYTES

if TYPE_CHECKING:
    from tests.simulator.host import Host

WINDOW = 10  # fragments in a hand-out's round
_WINDOWS = {Folder.PREPARED: 3, Folder.WORK: 2}
_STORE_S = 3e-4


@dataclass(frozen=True)
class Incoming:
    """The receiving end of a hand-out."""

    keep: bool
    collects: bool


@dataclass(frozen=True)
class _Begun:
    """A task, with what it tasks on: the folder of its job, and where a window comes from and goes to."""

    begin: BeginTask
    files: dict[str, Any]
    incoming: Incoming | None
    source: Host | None


class Disk:
    """Files by name, streams by number, and tasks in their order."""

    def __init__(self, host: Host) -> None:
        self._host, self._lan = host, host.lan
        self.files: dict[str, Any] = {}
        self.incoming: Incoming | None = None
        self._streams: dict[int, Any] = {}
        self._queue: deque[_Begun] = deque()
        self._accumulators: dict[int, ReserveAccumulators] = {}
        self._busy = False

    # ---- at once

    def take_accumulators(self, number: int) -> ReserveAccumulators:
        """What was reserved under that number."""
        return self._accumulators.pop(number)

    def hand_out(self, stream: int, first_round: int) -> bool:
        """That stream goes out; whether it is open."""
        if stream not in self._streams:
            return False
        self._host.handed_out[first_round] = self._streams[stream]
        return True

    def close(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def clear(self) -> None:
        """A job is over; tasks that have begun go on."""
        self.files = {}
        self._streams = {}
        self._accumulators = {}

    # ---- in the thread

    @property
    def stores_job(self) -> bool:
        """The end of what starts a training program is on its way to the disk."""
        return any(
            isinstance(begun.begin.task, StoreWindow) and begun.begin.task.reads_job
            for begun in self._queue
        )

    def begin(self, begin: BeginTask, source: Host | None) -> None:
        """A task; what it tasks on is settled now. `source`: of the hand-out that is under way."""
        self._queue.append(_Begun(begin, self.files, self.incoming, source))
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        self._busy = bool(self._queue)
        if self._queue:
            self._host.later(self._seconds(self._queue[0].begin.task), self._finish)

    def _seconds(self, task: Any) -> float:
        if isinstance(task, Settle):
            return 1e-5
        if isinstance(task, StoreWindow):
            return _STORE_S
        if isinstance(task, OpenStream) and task.folder is not Folder.KEPT:
            return self._lan.saving_s
        if isinstance(task, MakeResult | DrawReport):
            return 0.05
        if isinstance(task, ReserveAccumulators) and task.places and not task.room:
            return self._lan.odds.places_s()  # a view waits for them
        return self._lan.random.random() * 0.002

    def _finish(self) -> None:
        begun = self._queue.popleft()
        self._host.task_done(begun.begin.ticket, self._outcome(begun))
        self._go_on()

    def _outcome(self, begun: _Begun) -> Any:
        task = begun.begin.task
        if isinstance(task, ReserveAccumulators):
            if task.room and self._host.refuses_stripes:
                return StripesRefused("the kernel refuses nicps_stripes")
            self._accumulators[begun.begin.ticket] = task
            return begun.begin.ticket
        if isinstance(task, OpenStream):
            return self._open(task, begun.files)
        if isinstance(task, StoreWindow):
            return self._store(task, begun) if task.last else None
        if isinstance(task, KeepCheckpoint):
            self._host.checkpoint = begun.files.get(task.name)
        if isinstance(task, KeepRecords):
            return ["agent.json"] if self._lan.records else []
        return {} if isinstance(task, MakeResult) else None

    def _open(self, task: OpenStream, files: dict[str, Any]) -> StreamSize:
        if task.folder is Folder.KEPT:
            self._streams[task.stream] = "records"
            size = self._lan.records
            return StreamSize(size * PAYLOAD_BYTES, 5 if size else 0)
        state = files.get(task.files[0]["path"]) if task.folder is Folder.WORK else None
        self._streams[task.stream] = state or self._lan.prepared
        windows = 1 if state else _WINDOWS[task.folder]
        return StreamSize(windows * WINDOW * PAYLOAD_BYTES, 7)

    def _store(self, task: StoreWindow, begun: _Begun) -> Stored:
        assert begun.incoming is not None and begun.source is not None
        own = self._streams.get(task.stream)  # a host that is alone sends nothing
        content = own or begun.source.handed_out[task.round - task.window]
        if task.reads_job:
            return Stored("job", content)
        if begun.incoming.keep and not begun.incoming.collects:
            begun.files["state.npz"] = content
        return Stored("")
