# SPDX-License-Identifier: Apache-2.0
"""`nicps cancel`: end the job on all hosts."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from nicps.cli.arguments import add_socket
from nicps.errors import NetworkProblem
from nicps.session.commands import ask, connect
from nicps.session.messages import AskStatus, Cancel, Ok, Status

_LIMIT_S = 90.0  # the agents take 60 s for the end of the batch, and a few to agree
_POLL_S = 0.1
_NOTHING = "no round was whole yet: nothing is trained, and nothing is saved"


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps cancel`."""
    parser = subparsers.add_parser(
        "cancel",
        help="end the job on all hosts",
        description="End the job that is under way, on all hosts, from any host that takes part in it. The lead saves"
        " the model at the end of the batch (60 s at most), and `nicps resume` goes on from there. All hosts stay in"
        " the network. Of a run of `nicps run` the scripts are ended on all hosts, and there is no model to save. A"
        " command that waits for the job or the run ends with exit code 7.",
    )
    add_socket(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Send the request, and wait until the job has ended here.

    Raises:
        NetworkProblem: there is no job, or it does not end.
    """
    with connect(args.socket) as channel:
        before = ask(channel, AskStatus(), Status)
        ask(channel, Cancel(), Ok)
        if before.job:
            print(f"nicps: {announcement(before)}", file=sys.stderr)
        deadline = time.monotonic() + _LIMIT_S
        while (status := ask(channel, AskStatus(), Status)).state != "standby" or status.job:
            if time.monotonic() > deadline:
                why = f": {status.trouble}" if status.trouble else ""
                raise NetworkProblem(f"the job has not ended for {_LIMIT_S:g} s{why}")
            time.sleep(_POLL_S)
    print(outcome(before, status))
    return 0


def announcement(before: Status) -> str:
    """A line about the request."""
    if _is_script(before):
        return f"the scripts of run {before.job} are ended on all hosts"
    return f"job {before.job} ends with its batch"


def outcome(before: Status, after: Status) -> str:
    """A line about the job's end, as far as this host knows."""
    last, nothing = after.last_job, _is_untrained(before, after)
    if last is not None and last != before.last_job:
        if last.error and nothing:
            return f"job {last.job_id or '-'}: {last.error}; {_NOTHING}"
        return (
            f"job {last.job_id or '-'}: {last.error or 'it was done before it could be cancelled'}"
        )
    if _is_script(before):
        return (
            f"run {before.job} was cancelled; what its scripts have left is in the folder of runs of"
            " each host"
        )
    if nothing:
        return f"job {before.job} has ended; {_NOTHING}"
    leads = [member.name for member in before.members if member.number == before.lead]
    return f"job {before.job} has ended; {leads[0] if leads else 'its lead'} has what was saved"


def _is_untrained(before: Status, after: Status) -> bool:
    """Whether the job has ended before its first round was committed, so that it had nothing to save."""
    was, now = before.activity, after.activity
    if not before.job or _is_script(before) or was is None or now is None:
        return False
    # A job that has trained ends after one round more, and its training program has told how far it is.
    return not before.progress and (now.rounds, now.tests) == (was.rounds, was.tests)


def _is_script(status: Status) -> bool:
    return status.activity is not None and status.activity.script
