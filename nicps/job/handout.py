# SPDX-License-Identifier: Apache-2.0
"""Files between the members, as rounds of raw bytes: a job's files, states, and records (R5, R6, R20)."""

from __future__ import annotations

from nicps import wire
from nicps.errors import JobFailed
from nicps.job.actions import CloseStream, DropFragments, Receive
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Orders
from nicps.job.slow_work import StoreWindow
from nicps.protocol import Committed, Offer, Phase


class HandOut:
    """A host's part in one hand-out after the other.

    Args:
        window: fragments in a round.

    Attributes: `outgoing`, the stream that this host hands out next, 0 for none. `keeps`, received files are written,
    not only hashed. `collected`, hosts whose records have come (the lead).
    """

    def __init__(self, node: NodeInfo, window: int) -> None:
        self._node = node
        self._window_bytes = window * wire.PAYLOAD_BYTES
        self.outgoing = 0
        self.keeps = False
        self.collected: list[str] = []
        self._streams: dict[int, int] = {}  # by the phase's first round: the last two

    def is_source(self, phase: Phase) -> bool:
        """Whether this host hands out in that phase."""
        return bool(phase.settings["source"] == self._node.number)

    def stream_of(self, phase: Phase) -> int:
        """The stream that this host hands out in that phase; 0 if it does not, or has been withdrawn."""
        stream = self._streams.get(phase.first_round, 0) if self.is_source(phase) else 0
        return stream if stream == self.outgoing else 0

    def prepare(self, phase: Phase, has_job: bool) -> Orders:
        """A hand-out is decided: open its receiving end. `has_job`: the job's files are here already.

        Raises:
            JobFailed: this host is to hand out and has nothing.
        """
        node, settings, purpose = self._node, phase.settings, phase.settings["purpose"]
        members = node.view.members
        source = members[settings["source"] - 1].name
        if self.is_source(phase):
            if not self.outgoing:
                raise JobFailed("there is nothing here to hand out")
            last = list(self._streams.items())[-1:]
            self._streams = dict([*last, (phase.first_round, self.outgoing)])
        if purpose == "collect":
            self.keeps = node.leads
        elif purpose == "state":
            self.keeps = node.number in node.learners
        else:
            self.keeps = not has_job
        return [
            Receive(
                settings["bytes"],
                settings["index_bytes"],
                node.number,
                len(members),
                self.keeps,
                source if purpose == "collect" else "",
            )
        ]

    def store(self, phase: Phase, commit: Committed, has_job: bool) -> StoreWindow:
        """A window is committed: its bank is free once it is stored."""
        round_ = commit.round
        window, last = round_ - phase.first_round, round_ == phase.last_round
        size = min(self._window_bytes, phase.settings["bytes"] - window * self._window_bytes)
        stream = self.stream_of(phase)
        reads_job = phase.settings["purpose"] in ("job", "files") and not has_job
        fragments = phase.fragments_in(round_)
        return StoreWindow(round_, window, fragments, size, last, stream, last and reads_job)

    def offer_next(self, phase: Phase, commit: Committed) -> Orders:
        """At the source: the next window can go out."""
        if not self.is_source(phase) or commit.round == phase.last_round:
            return []
        return [Offer(commit.round + 1, 1)]

    def end(self, phase: Phase, stream: int, kept: bool) -> Orders:
        """The last window is stored, written if it was `kept`; at the source it came out of `stream`.

        The next phase may have begun meanwhile.
        """
        source = self._node.view.members[phase.settings["source"] - 1].name
        if phase.settings["purpose"] == "collect" and kept and source not in self.collected:
            self.collected.append(source)
        return self.withdraw() if stream and stream == self.outgoing else []

    def offer(self, stream: int) -> Orders:
        """This stream is handed out next; the rest of the last stream is not sent."""
        dropped: Orders = [DropFragments()] if self.outgoing else []
        orders = [*dropped, *self.withdraw()]
        self.outgoing = stream
        return orders

    def withdraw(self) -> Orders:
        """Hand out nothing of this host's."""
        stream, self.outgoing = self.outgoing, 0
        return [CloseStream(stream)] if stream else []
