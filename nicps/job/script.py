# SPDX-License-Identifier: Apache-2.0
"""A script in place of a job (`nicps run`, docs/run.md): the job's life only hands its files out, and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nicps.protocol import View


def is_script(settings: Mapping[str, Any]) -> bool:
    """Whether these settings are those of a script."""
    return isinstance(settings.get("script"), Mapping)


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """Every host has the files: start the script at this one, out of the job's folder.

    `hosts`: (name, MAC address) by rank. `rank`: this host's. `starter`: the rank of the host where the user waits.
    `submission`: at that host its number, else 0.
    """

    job: str
    entry: str
    settings: Mapping[str, Any]
    hosts: tuple[tuple[str, bytes], ...]
    rank: int
    starter: int
    submission: int = 0

    @classmethod
    def of(
        cls,
        job: str,
        entry: str,
        settings: Mapping[str, Any],
        view: View,
        number: int,
        submission: int,
    ) -> LaunchScript:
        """Make the start of a script in the view of its hand-out; ranks follow the members' numbers."""
        live = sorted(view.live)
        hosts = tuple((view.members[k - 1].name, view.members[k - 1].mac) for k in live)
        starter = live.index(view.lead)
        return cls(job, entry, settings, hosts, live.index(number), starter, submission)

    def environment(self, weights: str) -> dict[str, str]:
        """The variables that torchrun sets, without a rendezvous; `weights`: the file for the weights' digest at
        the end.
        """
        environment = {
            "RANK": str(self.rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_WORLD_SIZE": "1",
            "NICPS_WEIGHTS": weights,
            "PYTHONUNBUFFERED": "1",
        }
        if data := self.settings.get("data_path"):
            environment["NICPS_DATA"] = str(data)
        return environment
