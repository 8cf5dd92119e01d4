# SPDX-License-Identifier: Apache-2.0
"""What a member's training program would do after a round (R14), and when its agent is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nicps.session.fields import Message
from nicps.session.shared_form import Decide


class Decisions:
    """Every member's program decides. Only the lead's word goes out; who becomes the lead later sends its last one.

    Args:
        send: to the agent.
        lead: this member leads.
        holds_commits: rounds of the next step have been committed already.
    """

    def __init__(
        self, send: Callable[[Message], None], *, lead: bool, holds_commits: Callable[[], bool]
    ) -> None:
        self._send, self.lead, self._holds_commits = send, lead, holds_commits
        self._last: Decide | None = None  # about the last round that this member has committed
        #: Guards both until the agent has been told: a view may arrive in a channel's thread.
        self._deciding = threading.Lock()

    def decide(self, decision: Decide) -> bool:
        """About a round that this member has committed; return whether the word has gone out."""
        with self._deciding:
            self._last = decision
            # What the next step has committed came before the view in which this member leads.
            counts = self.lead and not self._holds_commits()
            if counts:
                self._send(decision)
            return counts

    def enter_view(self, *, lead: bool) -> None:
        """Another view is in force. The former lead may have died before it decided."""
        with self._deciding:
            led, self.lead = self.lead, lead
            if lead and not led and self._last is not None:
                self._send(self._last)

    def enter_phase(self, kind: str, *, lead: bool) -> None:
        """A phase begins. If it is training, a view change may have swallowed the end of training, or a test: said
        before the phase is in force.
        """
        self.lead = lead
        if lead and kind == "train" and self._last is not None and self._last.what != "continue":
            self._send(self._last)

    def forget(self) -> None:
        """Another state than that of the last round has been loaded."""
        self._last = None
