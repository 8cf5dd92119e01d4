# SPDX-License-Identifier: Apache-2.0
"""A Linux box that adds, in the place of a lab's bridge: `nicps switch xdp run`, as tests start it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nicps.lab import Lab, adding, namespaces, state
from nicps.switch.status import read_status

_VIEW = re.compile(r"nicps: view (\d+): adding for ")
_ROOM = re.compile(r"nicps: [\d,]+ fragments of lanes of \d+ bits take ")


@dataclass
class Box:
    """`key`: the switch's own, in a network with a key. `told`: further arguments of `nicps switch xdp run`."""

    lab: Lab
    key: Path | None = None
    told: Sequence[str] = ()
    process: subprocess.Popen[Any] | None = None
    _since: int = 0  # lines of its output that belong to networks before

    def start(self) -> None:
        """Start it, or start it again."""
        key = ["--key", str(self.key)] if self.key is not None else []
        self.process = adding.start(self.lab, *key, *self.told)

    def serve(self) -> None:
        """Make sure that it runs."""
        if self.process is None or self.process.poll() is not None:
            self.start()

    def trusting(self) -> list[str]:
        """The arguments of `nicps join` of a host that believes it."""
        return ["--switch-key", str(self.key)] if self.key is not None else ["--trust-switch"]

    def said(self) -> str:
        """All its output since the lab was made."""
        log = state.switch_log(self.lab.name)
        return log.read_text(errors="replace") if log.exists() else ""

    def counters(self) -> dict[str, int]:
        """Its XDP program's counts of frames by outcome."""
        (found,) = namespaces.inside(self.lab.switch_netns, read_status)
        return found.counters

    def forget(self) -> None:
        """A network that begins anew uses the numbers of views once more."""
        self._since = len(self.said().splitlines())

    def boots(self) -> dict[int, int]:
        """In which of its boots it has added for each view."""
        before: dict[int, int] = {}
        since: dict[int, int] = {}
        boot, rooms = 0, 0
        for at, line in enumerate(self.said().splitlines()):
            if " adds for " in line:  # it was started
                boot, rooms = boot + 1, 0
            elif _ROOM.match(line):
                boot, rooms = boot + (rooms > 0), rooms + 1
            elif "begun anew" in line:
                boot += 1
            elif match := _VIEW.match(line):
                found = before if at < self._since else since
                earlier = found.get(int(match[1]), boot)
                assert found is before or earlier == boot, (line, "in two boots")
                found[int(match[1])] = boot
        return {**before, **since}
