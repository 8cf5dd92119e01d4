# SPDX-License-Identifier: Apache-2.0
"""Direct calls of the program that is in a group: what it is given for them (docs/direct.md)."""

from __future__ import annotations

from nicps.agent.driver import log
from nicps.agent.loop import Loop
from nicps.dataplane import DataPlane, htb
from nicps.dataplane.direct import DirectCalls
from nicps.errors import NicpsError, explain
from nicps.session.shared_form import Phase


class DirectRoom:
    """At most one program has direct calls.

    Attributes: `share`, of the time, that its urgent calls may take beside less urgent rounds.
    """

    def __init__(self, dataplane: DataPlane, loop: Loop, share: float) -> None:
        self._dataplane, self._loop, self.share = dataplane, loop, share
        self._calls: DirectCalls | None = None

    def load(self) -> None:
        """Load the programs; may be called in any thread. Without them calls take rounds."""
        try:
            self._dataplane.open_direct()
        except NicpsError as error:
            log(explain("make direct calls", error))

    def enter(self, phase: Phase) -> tuple[int, ...]:
        """A phase of the group begins: its channels have direct calls. What is new for the program, as descriptors."""
        words = self._dataplane.maps.stripes.areas.words
        new: tuple[int, ...] = ()
        words["direct"] = 0
        if self._calls is None:
            try:
                self._calls = self._dataplane.share_direct()
            except (NicpsError, OSError) as error:
                log(explain("make direct calls", error))
            if self._calls is None:
                return ()
            new = self._calls.shared.descriptors
        urgencies = [channel.urgency for channel in phase.channels] or [0]
        for word, urgency in zip(words, urgencies, strict=False):
            word["queue"], word["direct"] = htb.of_urgency(urgency), 1
        return new

    def close(self) -> None:
        """The program is gone, or its group is over."""
        self._dataplane.maps.stripes.areas.words["direct"] = 0
        if self._calls is not None:
            self._loop.background(self._calls.close, lambda: None)
            self._calls = None
