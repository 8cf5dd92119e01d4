# SPDX-License-Identifier: Apache-2.0
"""The parts of this host's node that the parts of a job read."""

from __future__ import annotations

from typing import Protocol

from nicps.protocol import Phase, SwitchLink, View


class NodeInfo(Protocol):
    """A `Node`, read only: a part that wants something of the node returns an order for it (`nicps.job.orders`)."""

    @property
    def number(self) -> int:
        """This host's number in the list."""

    @property
    def name(self) -> str:
        """This host's name in the list."""

    @property
    def view(self) -> View:
        """The view in force."""

    @property
    def learners(self) -> frozenset[int]:
        """Members that have no state yet."""

    @property
    def leads(self) -> bool:
        """This host acts as node 1."""

    @property
    def changing(self) -> bool:
        """The view is about to end."""

    @property
    def open_round(self) -> int:
        """The open round; 0 before the first."""

    @property
    def rounds(self) -> tuple[int, ...]:
        """The open round of each channel of the phase in force; of one channel where none is."""

    @property
    def highest_round(self) -> int:
        """The highest of them: a phase that is decided on begins with a later one."""

    @property
    def between_steps(self) -> bool:
        """No step is under way here: the lead may decide, and take hosts in."""

    @property
    def phase(self) -> Phase | None:
        """The phase in force, or the one that is being prepared."""

    @property
    def phase_in_force(self) -> Phase | None:
        """The phase in force: its first token has been seen."""

    @property
    def switch(self) -> SwitchLink:
        """The state of a Linux switch that adds."""
