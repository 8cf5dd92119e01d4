# SPDX-License-Identifier: Apache-2.0
"""Files between the members, as rounds of raw bytes: a job's files, states, and results (R5, R6, R20)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from nicps.agent.bundle import WINDOW_BYTES, InStream, OutStream
from nicps.agent.sources import StreamSource
from nicps.errors import JobFailed
from nicps.protocol import Committed, Phase

if TYPE_CHECKING:
    from nicps.agent.job import LocalJob


class HandOut:
    """A host's part in one hand-out after the other.

    Attributes: `outgoing`, what this host hands out next; `collected`, hosts whose records have come (the lead).
    """

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        self._in: InStream | None = None
        self.outgoing: OutStream | None = None
        self.collected: list[str] = []

    def prepare(self, phase: Phase) -> None:
        """A hand-out is decided: make room for what comes, and open what goes out.

        Raises:
            JobFailed, OSError: this host is to hand out and has nothing, or cannot write.
        """
        job, settings = self._job, phase.settings
        agent = job.agent
        node, purpose = agent.node, settings["purpose"]
        mine = settings["source"] == node.number
        if mine:
            if self.outgoing is None:
                raise JobFailed("there is nothing here to hand out")
            job.sends(StreamSource(self.outgoing, phase.first_round))
        folder, owner = job.folder, (agent.user.uid, agent.user.gid)
        if purpose == "collect":
            keep = node.leads
            folder = agent.run_folder(job.id) / node.members[settings["source"] - 1].name
            owner = (0, 0)
            if keep:
                folder.mkdir(parents=True, exist_ok=True)
        else:  # who has it already only looks on
            keep = node.number in node.learners if purpose == "state" else not job.digest
        if self._in is not None:
            agent.loop.background(self._in.close, lambda: None)
        self._in = InStream(
            folder,
            settings["bytes"],
            settings["index_bytes"],
            node.number,
            len(node.members),
            owner if os.geteuid() == 0 else (os.getuid(), os.getgid()),
            keep,
        )

        def prepared() -> None:
            agent.prepared(phase.number)
            if mine:
                agent.act(node.offer(agent.now, phase.first_round, 1))

        # Windows of a hand-out before this one are on disk then: their banks are free.
        job.later(lambda: None, lambda: job.allocate(phase, prepared))

    def committed(self, phase: Phase, commit: Committed) -> None:
        """Store a window in the background; its bank is free once it is on disk."""
        job, stream, round_ = self._job, self._in, commit.round
        agent = job.agent
        assert stream is not None
        window, last = round_ - phase.first_round, round_ == phase.last_round
        size = min(WINDOW_BYTES, phase.settings["bytes"] - window * WINDOW_BYTES)
        if phase.settings["source"] == agent.node.number:
            source = job.source()
            assert isinstance(source, StreamSource)
            out = source.stream
            fragments = phase.fragments_in(round_)
            job.later(
                lambda: stream.write(out.read(window, 0, fragments).reshape(-1)[:size]),
                lambda: self._stored(phase, stream, round_, last, out),
            )
            if not last:
                agent.act(agent.node.offer(agent.now, round_ + 1, 1))
        else:
            bank = agent.dataplane.accumulators[round_ & 1]
            data = bank.view(np.uint8).reshape(-1)[:size]
            job.later(lambda: stream.write(data), lambda: self._stored(phase, stream, round_, last))

    def _stored(
        self, phase: Phase, stream: InStream, round_: int, last: bool, out: OutStream | None = None
    ) -> None:
        """A window is on disk; at its source, out of `out`. The next phase may have begun meanwhile."""
        job = self._job
        agent = job.agent
        agent.act(agent.node.read(agent.now, round_))
        if not last:
            return
        digest = stream.finish()
        if out is not None and out is self.outgoing:
            self.withdraw()
        if phase.settings["purpose"] in ("job", "files") and not job.digest:
            job.handed_out(digest)
        source = agent.node.members[phase.settings["source"] - 1].name
        collects = phase.settings["purpose"] == "collect" and stream.keep  # not who only looks on
        if collects and source not in self.collected:
            self.collected.append(source)
        agent.handed_out(phase)

    def offer(self, stream: OutStream) -> None:
        """This is handed out next; what is left to send of the last one is not sent."""
        if self.outgoing is not None:
            self._job.agent.frames.drop_fragments()
        self.withdraw()
        self.outgoing = stream

    def withdraw(self) -> None:
        """Nothing of this host's is handed out. The thread may still be reading: it closes the files."""
        stream, self.outgoing = self.outgoing, None
        if stream is not None:
            self._job.agent.loop.background(stream.close, lambda: None)

    def close(self) -> None:
        """Close what is open; in the thread that may be using it."""
        for stream in (self._in, self.outgoing):
            if stream is not None:
                stream.close()
