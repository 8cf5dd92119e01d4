# SPDX-License-Identifier: Apache-2.0
"""The `nicps` command: one module of this folder per sub-command, imported only when it is called.

Exit codes: 0 done, 1 failed, 2 wrong use, 3 this machine lacks something, 4 no network or no agent,
5 the job failed, 6 too few members were left and the job was saved, 7 the job was cancelled, 130 interrupted. Every
error is one line on stderr unless `--verbose` asks for the
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

from nicps import __version__
from nicps.errors import NicpsError
from nicps.extras import missing_extra
from nicps.usage import OneLineParser

COMMANDS: dict[str, str] = {
    "join": "be in the network on an interface, until stopped",
    "run": "start a script on all hosts",
    "submit": "give a job to the local agent",
    "resume": "go on with a job that was saved",
    "status": "show the network, its members and the job",
    "top": "show a live view of the network and the job",
    "cancel": "end the job on all hosts",
    "leave": "take this host out of the network",
    "key": "make the key that all hosts of a network share",
    "doctor": "check this host, and say how to mend what is wrong",
    "switch": "run a switch that adds: a Linux box, or P4",
    "lab": "a LAN of namespaces on this machine",
    "dbn": "train a deep belief network by iterative reduce",
    "bench": "measure",
    "wire": "print the frame formats, read a capture",
}

#: Commands whose program takes all arguments that follow, as if `--` stood before them.
PASS_ON = frozenset({"dbn"})

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class CommandParser(OneLineParser):
    """A parser whose sub-commands all accept `--verbose`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("conflict_handler", "resolve")
        super().__init__(*args, **kwargs)
        self.add_argument(
            "--verbose",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )


def build_parser(command: str | None = None) -> CommandParser:
    """The parser with the arguments of `command` only, so that only its module is imported."""
    parser = CommandParser(prog="nicps", description="The network adds up gradients.")
    parser.add_argument("--version", action="version", version=f"nicps {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, text in COMMANDS.items():
        if name == command:
            module = importlib.import_module(f"nicps.cli.{name}")
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def _own(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments of `nicps` itself: those after `--` are another program's."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _marked(arguments: list[str]) -> list[str]:
    """The arguments, with `--` after a command that passes its arguments on."""
    at = next((at for at, word in enumerate(arguments) if not word.startswith("-")), None)
    if at is None or arguments[at] not in PASS_ON:
        return arguments
    return [*arguments[: at + 1], "--", *arguments[at + 1 :]]


def _command(own: Sequence[str]) -> str | None:
    return next((word for word in own if not word.startswith("-")), None)


def import_command(arguments: Sequence[str]) -> None:
    """Import the module of the command that these arguments call; `main` reports its errors."""
    command = _command(_own(arguments))
    if command in COMMANDS:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"nicps.cli.{command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _marked(list(sys.argv[1:] if argv is None else argv))
    own = _own(arguments)
    verbose = "--verbose" in own
    try:
        parser = build_parser(_command(own))
        options = parser.parse_args(arguments)
        run = cast(Callable[[argparse.Namespace], int], options.func)
        code = run(options)
        sys.stdout.flush()
        return code
    except NicpsError as error:
        return _fail(error, str(error), error.exit_code, verbose)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone: not an error, but Python's exit must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            return _fail(error, str(missing), missing.exit_code, verbose)
        text = f"unexpected {type(error).__name__}: {error} (--verbose shows where)"
        return _fail(error, text, EXIT_FAILED, verbose)


def _fail(error: BaseException, text: str, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    line = " ".join(text.split())
    print(f"nicps: error: {line}", file=sys.stderr)
    return code
