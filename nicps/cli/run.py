# SPDX-License-Identifier: Apache-2.0
"""`nicps run`: start a script on all hosts of the network, each with its rank (docs/run.md)."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from nicps.cli.arguments import add_data, add_socket
from nicps.cli.submit import show
from nicps.errors import JobFailed, NetworkProblem, NotKept, UsageProblem
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.commands import connect, follow, submit
from nicps.session.events import Launched, Output, Preparing
from nicps.session.messages import Result, Submit

DESCRIPTION = """\
Start a script on all hosts whose agents stand by, one process on each, as the training user. The script's folder is
handed out to them. RANK and WORLD_SIZE are set, and dist.init_process_group("nicps") makes them a group. Their output
comes back with the host's name in front of each line. Ctrl-C ends the script everywhere. The exit code is that of the
first host, by rank, where it is not 0; 5 if a host was lost; 8 if all went well, and what a script has left could not
be kept. See docs/run.md."""
_NAMED = 5  # files that were removed
_DRAW_S = 5.0  # a line that is drawn again and again is printed so often
#: What PyTorch says of a script whose process group is not ours: here no address, or one that leads nowhere.
_NOT_OURS = (
    "environment variable MASTER_ADDR expected",
    "seconds waiting for clients",
    "while trying to connect to (localhost",
    "while trying to connect to (127.0.0.1",
    "Unknown backend type nicps",
)


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps run`."""
    parser = subparsers.add_parser(
        "run", help="start a script on all hosts", description=DESCRIPTION
    )
    add_data(parser, "script")
    parser.add_argument(
        "--network",
        action="store_true",
        help="let the script use the host's network (downloads, Gloo); otherwise it has none of its own",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the result as one JSON line on stdout; what scripts print goes to stderr",
    )
    parser.add_argument(
        "--result", type=Path, metavar="FILE", help="the result as one JSON line in this file, too"
    )
    add_socket(parser)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments"
    )
    parser.beside_unknown = ("a script's arguments go after the script", "")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Start the script, and show its output until it has ended on all hosts."""
    script = args.script.absolute()
    if not script.is_file():
        raise UsageProblem(f"{args.script} is not a file: name a Python script")
    with _opened(args.result) as result:
        return _run(args, script, result)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes] | None]:
    """The file for the result, if one is requested."""
    if path is None:
        yield None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise UsageProblem(f"--result {path}: {error.strerror}; name another file") from None
    with file:
        yield file


def _run(args: argparse.Namespace, script: Path, file: IO[bytes] | None) -> int:
    settings = {
        "script": {"path": script.name, "arguments": args.arguments},
        "network_access": args.network,
        "data_path": os.path.abspath(args.data) if args.data else None,
        "batch": 1,
        "lane": "i32",
    }
    with connect(args.socket) as channel:
        submit(channel, Submit(str(script.parent), settings=settings, entry="trainer.script"))
        lines = _Lines(sys.stderr if args.json else sys.stdout, sys.stderr)
        with contextlib.closing(lines):
            result = _follow(channel, lines)
    if "exit_codes" not in result:
        lead = result.get("lead", "another host")
        raise NetworkProblem(
            f"{lead} goes on with the run, and this host is not in it: start it again"
        )
    if file is not None:
        file.write(orjson.dumps(dict(result)) + b"\n")
    return _finish(result, as_json=args.json)


def _follow(channel: Channel, lines: _Lines) -> Mapping[str, Any]:
    """Show what comes of the run, until its result.

    Raises:
        NetworkProblem: the agent was killed while scripts were under way.
    """
    name = place = ""
    try:
        for message in follow(channel):
            if isinstance(message, Output):
                lines.add(message.host, message.stream, message.text)
            elif isinstance(message, Launched):
                name = message.job_id
                place = f"{message.folder or f'RUNS/{name}'} there, or in {name} of its own --runs"
                print(f"nicps: {name} on {', '.join(message.hosts)}", file=sys.stderr)
            elif isinstance(message, Result):
                return message.result
            elif not isinstance(message, Preparing):  # a script's folder is only packed
                show(message)
    except KeyboardInterrupt:
        if name:
            print(
                f"nicps: {name} ends on all hosts; what each of them has kept is in {place}",
                file=sys.stderr,
            )
        raise
    except ChannelClosed:
        if not name:
            raise
        raise NetworkProblem(
            "the agent of this host has gone: the scripts on the other hosts go on, and the results of each are in"
            f" {place}; `nicps cancel` on one of these hosts ends them"
        ) from None
    raise AssertionError("a run ends with a result or an error")


class _Lines:
    """Whole lines of several hosts, each with the host's name in front, of stdout and of stderr."""

    def __init__(self, stdout: Any, stderr: Any) -> None:
        self._files = {"stdout": stdout, "stderr": stderr}
        self._rest: dict[tuple[str, str], str] = {}
        self._drawn_at: dict[tuple[str, str], float] = {}
        self._not_ours = ""

    def add(self, host: str, stream: str, text: str) -> None:
        """More output of that host."""
        rest = self._rest.get((host, stream), "")
        *whole, rest = (rest + text).split("\n")
        self._print(host, stream, [_as_drawn(line) for line in whole])
        self._rest[host, stream] = self._draw(host, stream, rest) if "\r" in rest else rest

    def _draw(self, host: str, stream: str, line: str) -> str:
        """A line that is drawn again and again, such as a progress bar: from time to time it is printed as it is.

        Returns what counts of it: the last drawing that is whole, and the next one.
        """
        *_, before, drawn, drawing = ["", *line.split("\r")]
        shown = drawn if drawing else before  # after "\r" alone the end of this line may follow
        now = time.monotonic()
        if shown and now - self._drawn_at.get((host, stream), -math.inf) >= _DRAW_S:
            self._drawn_at[host, stream] = now
            self._print(host, stream, [shown])
        return f"{drawn}\r{drawing}"

    def close(self) -> None:
        """The rest: lines without an end, and what a script's error means here."""
        for (host, stream), rest in self._rest.items():
            self._print(host, stream, [_as_drawn(rest)] if rest else [])
        if self._not_ours:
            print(
                f'nicps: "{self._not_ours}": the process group is not that of nicps. The script needs `import'
                ' nicps.torch` and dist.init_process_group("nicps")',
                file=self._files["stderr"],
            )

    def _print(self, host: str, stream: str, lines: list[str]) -> None:
        file = self._files[stream]
        for line in lines:
            print(f"{host}: {line}", file=file)
            self._not_ours = next((text for text in _NOT_OURS if text in line), self._not_ours)
        file.flush()


def _as_drawn(line: str) -> str:
    """What a terminal shows of a line with carriage returns in it."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def _finish(result: Mapping[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(orjson.dumps(dict(result)).decode(), flush=True)
    codes: Mapping[str, int | None] = result["exit_codes"]
    failed = {name: code for name, code in codes.items() if code != 0}
    for name, code in failed.items():
        how = "was lost" if code is None else f"ended with exit code {code}"
        print(f"nicps: {name} {how}", file=sys.stderr)
    if failed or result["weights_identical"] is False:
        print(f"nicps: what each host has kept is in {result['folder']} there", file=sys.stderr)
    if result["weights_identical"] is False:
        print("nicps: the hosts' weights differ", file=sys.stderr)
    not_kept: Mapping[str, str] = result.get("not_kept", {})
    for name, why in not_kept.items():
        print(f"nicps: {name}: {why}", file=sys.stderr)
    if removed := result.get("removed"):
        print(f"nicps: {_text_of(removed)}", file=sys.stderr)
    first = next((code for code in failed.values() if code is not None), None)
    if first is not None:
        return first
    if failed or result["weights_identical"] is False:
        return JobFailed.exit_code
    return NotKept.exit_code if not_kept else 0


def _text_of(removed: Mapping[str, Mapping[str, Any]]) -> str:
    """Of the files that were removed with the scripts' folders, by host."""
    count = sum(each["files"] for each in removed.values())
    names = sorted({name for each in removed.values() for name in each["first"]})
    what = "1 file that a script wrote" if count == 1 else f"{count} files that scripts wrote"
    return (
        f"{what} outside of out/ went with the folder on {', '.join(removed)}: {', '.join(names[:_NAMED])}"
        f"{', ...' if count > _NAMED else ''}; what is written to out/ is kept"
    )
