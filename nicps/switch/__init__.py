# SPDX-License-Identifier: Apache-2.0
"""P4 switches that run our program (docs/switch.md): set up, given their members, and read."""

from nicps.switch.recorder import Recorder
from nicps.switch.runtime import Info, Port, Program, Switch

__all__ = ["Info", "Port", "Program", "Recorder", "Switch"]
