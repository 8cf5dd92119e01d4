# SPDX-License-Identifier: Apache-2.0
"""What ended a child process, in one line: its own error message, or its signal or exit status and its last words."""

from __future__ import annotations

import signal
from pathlib import Path

#: Before an error that the trainer itself reports (`trainer/__main__.py`).
_REPORTS = "trainer: error: "
_WITH_LOG = 300  # characters of a reason and a path; the agent adds the host's name and more
_CUT = " ..."


def reported_error(last_line: str) -> str:
    """The error that the trainer reported in its last line; empty if that line is something else."""
    return last_line.removeprefix(_REPORTS) if last_line.startswith(_REPORTS) else ""


def describe_end(code: int | None, last_line: str, where: str = "") -> str:
    """How a process ended, after "... ended: ".

    Args:
        code: its exit status, negative for a signal; None if it is unknown.
        last_line: the last line of its log.
        where: such as " in round 7".
    """
    reported = reported_error(last_line)
    if code is not None and code < 0:
        last_words = reported or last_line
        said = f" ({last_words})" if last_words else ""
        return f"{signal_name(-code)} has ended it{where}{said}"
    if reported:
        return reported
    status = f"exit status {'unknown' if code is None else code}{where}"
    return f"{last_line} ({status})" if last_line else f"{status}, and it said nothing"


def name_log(why: str, log: Path, most: int = _WITH_LOG) -> str:
    """The reason, cut so that it fits one line of the agent's together with the name of its log.

    Args:
        most: characters of both. The default is for a reason that other hosts are told.
    """
    room = max(0, most - len(str(log)))
    if len(why) > room:
        why = why[: max(0, room - len(_CUT))] + _CUT
    return f"{why}; its log: {log}"


def signal_name(number: int) -> str:
    """`SIGSEGV`; a real-time signal has its number only."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
