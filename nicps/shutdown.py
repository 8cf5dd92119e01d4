# SPDX-License-Identifier: Apache-2.0
"""Which signals end a command.

`nohup` starts a command with SIGHUP ignored, a shell without job control starts background commands with SIGINT
ignored: whoever started it does not want it to end by them. SIGTERM always ends a command.
"""

from __future__ import annotations

import signal


def ending_signals(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those to set a handler for: all but those, SIGTERM excepted, that are ignored."""
    return [
        number
        for number in numbers
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
