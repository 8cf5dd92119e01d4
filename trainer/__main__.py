# SPDX-License-Identifier: Apache-2.0
"""`python -m trainer check|prepare|run|report`: what `nicps lab run` and the agent start, without privileges."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nicps.errors import EnvironmentProblem, NicpsError
from nicps.extras import missing_extra
from nicps.startup import leave
from trainer import startup
from trainer.errors import FolderError, JobError, SettingError, print_cause


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 1 with one line on stderr (2: a setting or the folder is wrong; 3: no such package)."""
    options = _parser().parse_args(arguments)
    try:
        options.func(options)
    except NicpsError as error:
        if options.func is not _run:  # which has done so before it told the agent
            print_cause(error)
        print(f"trainer: error: {error}", file=sys.stderr)
        if os.environ.get("NICPS_VERBOSE") and error.__cause__ is not None:
            raise
        known = SettingError, FolderError, EnvironmentProblem
        return error.exit_code if isinstance(error, known) else 1
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        print(f"trainer: error: {missing}", file=sys.stderr)
        return missing.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prepare = commands.add_parser("prepare", help="make the files that are handed out (R5, R6)")
    prepare.add_argument("--job", type=Path, required=True, help="the job's folder, or a job.tar")
    prepare.add_argument("--out", type=Path, required=True, help="folder for the files")
    prepare.add_argument("--data", help="handed to the job's data(); default: NICPS_DATA")
    prepare.add_argument("--settings", default="{}", help="settings as JSON, over the job's own")
    prepare.add_argument("--resume", type=Path, help="go on from this checkpoint (R22)")
    prepare.set_defaults(func=_prepare)

    check = commands.add_parser("check", help="say what is wrong before anything is made")
    check.add_argument("--job", type=Path, required=True, help="the folder of a job or a script")
    check.add_argument("--script", help="it is no job, but has this script")
    check.add_argument("--settings", default="{}", help="settings as JSON, over the job's own")
    check.set_defaults(func=_check)

    run = commands.add_parser("run", help="train as a member; the agent's socket is NICPS_SOCKET")
    run.add_argument("--workdir", type=Path, required=True, help="folder with what was handed out")
    run.set_defaults(func=_run)

    report = commands.add_parser("report", help="write RUN_DIR/report.html")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(func=_report)
    return parser


def _prepare(options: argparse.Namespace) -> None:
    startup.import_torch()
    from trainer.prepare import prepare

    overrides = _overrides(options.settings)
    prepare(options.job, options.out, options.data, overrides, options.resume)


def _check(options: argparse.Namespace) -> None:
    from trainer.check import check_job, check_script

    if options.script is not None:
        check_script(options.job, options.script)
    else:
        check_job(options.job, _overrides(options.settings))


def _overrides(text: str) -> dict[str, Any]:
    try:
        overrides: Any = json.loads(text)
    except ValueError as error:
        raise JobError(f"--settings is not JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise JobError(f"--settings must be a JSON object, not {text}")
    return overrides


def _run(options: argparse.Namespace) -> None:
    startup.import_torch()
    from trainer.run import run

    run(options.workdir)


def _report(options: argparse.Namespace) -> None:
    from trainer.report import write_report

    print(write_report(options.run_dir))


if __name__ == "__main__":
    leave(main())
