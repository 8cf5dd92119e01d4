# SPDX-License-Identifier: Apache-2.0
"""How ranks of Gloo on the hosts of a lab find each other."""

from __future__ import annotations

from nicps.lab import Lab
from nicps.lab.links import HOST_INTERFACE

_PORT = 29500


def gloo_variables(lab: Lab, port: int = _PORT) -> list[dict[str, str]]:
    """The environment variables of each rank, one rank on each host, in the hosts' order."""
    return [
        {
            "MASTER_ADDR": lab.hosts[0].ip,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(lab.hosts)),
            "GLOO_SOCKET_IFNAME": HOST_INTERFACE,
        }
        for rank in range(len(lab.hosts))
    ]
