# SPDX-License-Identifier: Apache-2.0
"""A simulated host in a group: as one in a phase with channels, and its program makes calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulator.channel_host import ChannelHost
from tests.simulator.sized_program import SizedProgram

if TYPE_CHECKING:
    from tests.simulator.sized_lan import SizedLan


class SizedHost(ChannelHost):
    """Attributes: `program`, that of the group, and what the agent does for it."""

    lan: SizedLan
    program: SizedProgram

    def make_program(self) -> SizedProgram:
        """As `ChannelHost`."""
        return SizedProgram(self)
