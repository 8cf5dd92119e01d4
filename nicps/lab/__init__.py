# SPDX-License-Identifier: Apache-2.0
"""The namespace lab: a LAN of network namespaces on one machine, joined by a bridge.

Library and `nicps lab` stand for real hosts on a real switch; no code outside this folder may know that it runs in a
lab.
"""

from nicps.lab.errors import AgentFailed, LabExists, LabNotFound, LabProblem
from nicps.lab.lab import Host, Lab, PortCounters
from nicps.lab.links import LinkStatus
from nicps.lab.port import PortCount, PortFaults
from nicps.lab.settings import (
    Faults,
    LabSettings,
    parse_delay,
    parse_loss,
    parse_probability,
)
from nicps.lab.teardown import Removed, down, standing, the_only

__all__ = [
    "AgentFailed",
    "Faults",
    "Host",
    "Lab",
    "LabExists",
    "LabNotFound",
    "LabProblem",
    "LabSettings",
    "LinkStatus",
    "PortCount",
    "PortCounters",
    "PortFaults",
    "Removed",
    "down",
    "parse_delay",
    "parse_loss",
    "parse_probability",
    "standing",
    "the_only",
]
