# SPDX-License-Identifier: Apache-2.0
"""A stage whose switch is a Linux box that adds; its hosts believe it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nicps.lab import Lab, adding, state
from tests.netns.labs import nicps
from tests.netns.stage import Stage

_VIEW = re.compile(r"nicps: view (\d+): adding for ")
_ROOM = re.compile(r"nicps: [\d,]+ fragments of lanes of \d+ bits take ")


@dataclass
class SwitchedStage(Stage):
    """`doubters`: hosts that do not believe the switch. `told`: further arguments of `nicps switch xdp run`."""

    doubters: set[str] = field(default_factory=set)
    told: Sequence[str] = ()
    switch: subprocess.Popen[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lab = Lab(replace(self.lab.settings, switch="xdp"))
        self.switch_key = self.folder / "switch.key"
        if self.keyed:
            assert nicps("key", "new", str(self.switch_key)).returncode == 0

    def up(self) -> None:
        self.lab.up()
        self.start_switch()
        self.ready()

    def start_switch(self) -> None:
        """Start it, or start it again."""
        key = ["--key", str(self.switch_key)] if self.keyed else []
        self.switch = adding.start(self.lab, *key, *self.told)

    def serve(self) -> None:
        """Make sure that it runs."""
        if self.switch is None or self.switch.poll() is not None:
            self.start_switch()

    def more_arguments(self, host: str) -> list[str]:
        more = super().more_arguments(host)
        if host in self.doubters:
            return more
        believes = ["--switch-key", str(self.switch_key)] if self.keyed else ["--trust-switch"]
        return [*more, *believes]

    def said(self) -> str:
        """All output of the switch since the lab was made."""
        return state.switch_log(self.lab.name).read_text(errors="replace")

    def boots(self) -> dict[int, int]:
        found: dict[int, int] = {}
        boot, rooms = 0, 0
        for line in self.said().splitlines():
            if " adds for " in line:  # it was started
                boot, rooms = boot + 1, 0
            elif _ROOM.match(line):
                boot, rooms = boot + (rooms > 0), rooms + 1
            elif "begun anew" in line:
                boot += 1
            elif match := _VIEW.match(line):
                assert found.setdefault(int(match[1]), boot) == boot, (line, "in two boots")
        return found
