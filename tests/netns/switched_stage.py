# SPDX-License-Identifier: Apache-2.0
"""A stage whose switch is a Linux box that adds; its hosts believe it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.netns.box import Box
from tests.netns.stage import Stage


@dataclass
class SwitchedStage(Stage):
    """`doubters`: hosts that do not believe the switch. `told`: further arguments of `nicps switch xdp run`."""

    adds: bool | None = True
    doubters: set[str] = field(default_factory=set)
    told: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adding.told = self.told

    @property
    def adding(self) -> Box:
        """The switch."""
        assert self.box is not None
        return self.box

    @property
    def switch(self) -> subprocess.Popen[Any] | None:
        """Its process."""
        return self.adding.process

    def start_switch(self) -> None:
        """Start it, or start it again."""
        self.adding.start()

    def trusting(self, host: str) -> list[str]:
        return [] if host in self.doubters else super().trusting(host)

    def said(self) -> str:
        """All output of the switch since the lab was made."""
        return self.adding.said()

    def boots(self) -> dict[int, int]:
        return self.adding.boots()
