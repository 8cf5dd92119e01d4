# SPDX-License-Identifier: Apache-2.0
"""The namespace lab: a LAN of network namespaces on one machine, joined by a bridge.

Library and `nicps lab` stand for real hosts on a real switch; nothing outside this folder may know
that it runs in one.
"""

from nicps.lab.errors import AgentFailed, LabExists, LabNotFound, LabProblem
from nicps.lab.lab import Host, Lab, PortCounters, Removed, down, standing
from nicps.lab.links import LinkStatus
from nicps.lab.port import LossCount
from nicps.lab.settings import LabSettings, format_rate, parse_loss, parse_rate

__all__ = [
    "AgentFailed",
    "Host",
    "Lab",
    "LabExists",
    "LabNotFound",
    "LabProblem",
    "LabSettings",
    "LinkStatus",
    "LossCount",
    "PortCounters",
    "Removed",
    "down",
    "format_rate",
    "parse_loss",
    "parse_rate",
    "standing",
]
