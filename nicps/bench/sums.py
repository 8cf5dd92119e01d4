# SPDX-License-Identifier: Apache-2.0
"""`nicps bench sums`: a run's saved gradients once more, through the XDP program as on a plain LAN.

A switch that adds, and hosts that add, must give the same sums. So the gradients that a run has kept (`save_gradients`)
are made into fragments again and given to the XDP program by BPF_PROG_TEST_RUN. Its sums are compared with those that
the run has trained on, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps
from nicps.errors import JobFailed, UsageProblem
from nicps.exchange import Exchange
from nicps.session.lanes import F32, U8, LaneFormat, Quantiser, Summer

_NETWORK, _VIEW, _ROUND = 1, 1, 1
_OFFERED = ("number", "vector")
_COMMITTED = (*_OFFERED, "counted", "members", "unit")
_MAC = bytes.fromhex("020000000001")

DESCRIPTION = """\
Sum a run's saved gradients with the XDP program, as hosts on a plain LAN do, and compare with what the run has trained
on. Each FOLDER is one host's part of the run, with its gradients in it: DIR/JOB/HOST."""

#: The arrays that a member has saved of a round: its contribution, and the sum, unless it died before the commit.
Saved = Mapping[str, Any]


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps bench sums`."""
    parser = subparsers.add_parser(
        "sums", help="a run's sums, by the XDP program", description=DESCRIPTION
    )
    parser.add_argument("folder", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--lane", choices=("i32", "i16", "i8"), default="i16")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compare, and report the result."""
    found = compare(read(args.folder), int(args.lane[1:]))
    if args.json:
        print(orjson.dumps(found).decode())
    else:
        print(
            f"{found['rounds']} rounds, {found['gradients']} gradients: the XDP program's sums are those of the run"
        )
    return 0


def read(folders: Sequence[Path]) -> dict[int, dict[int, Saved]]:
    """The files that the members of a run have saved, by round and member number.

    Raises:
        UsageProblem: there are none, or one cannot be read.
    """
    rounds: dict[int, dict[int, Saved]] = {}
    for folder in folders:
        paths = sorted((folder / "gradients").glob("*.npz"))
        if not paths:
            raise UsageProblem(
                f"{folder} has no gradients: run the job with --set save_gradients=true"
            )
        for path in paths:
            values = _load(path)
            rounds.setdefault(int(path.stem), {})[int(values["number"])] = values
    return rounds


def _load(path: Path) -> Saved:
    if not path.stem.isdecimal():
        raise UsageProblem(f"{path} is not named by a round")
    try:
        with path.open("rb") as file, np.load(file) as saved:
            values = dict(saved)
    # A file of another kind (an array of its own, or an empty file) is no context manager.
    except (OSError, ValueError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise UsageProblem(f"{path} cannot be read: {error or repr(error)}") from None
    wanted = _COMMITTED if "total" in values else _OFFERED
    if missing := sorted(set(wanted) - values.keys()):
        raise UsageProblem(f"{path} lacks {', '.join(missing)}: it is no gradient that nicps saved")
    return values


def compare(rounds: Mapping[int, Mapping[int, Saved]], width: int) -> dict[str, int]:
    """Sum every round again; return the number of rounds and gradients.

    Raises:
        JobFailed: a sum differs, or a gradient that was counted is missing.
        UsageProblem: sums were made in stripes, or by a Linux switch: each is rounded once more.
        NotRoot, KernelHeadersMissing, BpfLoadError: as `loader.load`.
    """
    quantisers: dict[tuple[int, str], Quantiser] = {}
    compared = gradients = 0
    with _kernel() as (program, maps):
        for round_, members in sorted(rounds.items()):
            sums = {number: saved for number, saved in members.items() if "total" in saved}
            if not sums:
                continue  # it was begun, and not committed
            first = next(iter(sums.values()))
            exchange = str(first.get("exchange", ""))
            if exchange and Exchange.named(exchange).absolute:
                raise UsageProblem(
                    f"round {round_}: the run's exchange is {exchange}, whose sums are rounded once more:"
                    " run the job with --set exchange=broadcast"
                )
            counted, unit = first["counted"][:, 0].tolist(), int(first["unit"])
            format = LaneFormat(len(first["total"]), width, int(first["members"]))
            if set(counted) - members.keys():
                raise JobFailed(f"round {round_}: not all the gradients that were counted are here")
            maps.allocate(-(-format.fragments // wire.fragments_per_block(width)))
            for number in counted:
                saved = members[number]
                life = number, str(saved.get("life", ""))  # the life that its residual belongs to
                quantiser = quantisers.setdefault(life, Quantiser(replace(format, members=0)))
                quantiser.format = format
                lanes, shifts = _fragments(quantiser, saved["vector"], unit)
                for index in range(format.fragments):
                    frame = _frame(format, number, index, lanes[index], int(shifts[index]))
                    bpf.prog_test_run(program, frame)
                quantiser.keep()
            compared, gradients = compared + 1, gradients + len(counted)
            if maps.count(_ROUND, _VIEW, 0) != len(counted) * format.fragments:
                raise JobFailed(f"round {round_}: fragments were refused: {maps.counters()}")
            total = np.zeros(format.lanes, np.float32)
            if counted:
                _sum(format, maps, unit, total)
            for number, saved in sums.items():
                if not np.array_equal(saved["total"].view(np.uint32), total.view(np.uint32)):
                    raise JobFailed(f"round {round_}: member {number} has trained on another sum")
    return {"rounds": compared, "gradients": gradients}


@contextmanager
def _kernel() -> Iterator[tuple[int, Maps]]:
    """The XDP program, on no interface, at a host that only listens to 64 members."""
    with ExitStack() as stack:
        loaded = loader.load("nicps.c", {"nicps_xdp": "xdp"})
        stack.callback(loaded.close)
        maps = Maps(loaded.maps)
        stack.callback(maps.close)
        macs = [_MAC] * wire.MAX_MEMBERS
        maps.enter_view(_VIEW, wire.MAX_MEMBERS, macs, 1)
        config = maps.config
        config["network"], config["enabled"] = _NETWORK, 1
        config["round"] = config["round_low"] = config["round_high"] = _ROUND
        yield loaded.programs["nicps_xdp"], maps


def _fragments(quantiser: Quantiser, vector: F32, unit: int) -> tuple[U8, U8]:
    """uint8 (fragments, 1440) and the shifts, uint8 (fragments,)."""
    format = quantiser.format
    lanes = np.zeros((format.fragments, wire.PAYLOAD_BYTES), np.uint8)
    shifts = np.zeros(format.fragments, np.uint8)
    done = 0
    while done < format.fragments:
        done += quantiser.batch(vector, done, unit, lanes, shifts)
    return lanes, shifts


def _frame(format: LaneFormat, number: int, index: int, lanes: U8, shift: int) -> bytes:
    header = wire.Header(network=_NETWORK, view=_VIEW, round=_ROUND, sender=number)
    per = wire.lanes_per_fragment(format.width)
    body = wire.Fragment(index, format.fragments, per, format.width, shift, 1)
    return wire.ethernet(_MAC, wire.pack(header, body, tail=lanes.tobytes()))


def _sum(format: LaneFormat, maps: Maps, unit: int, out: F32) -> None:
    summer, done = Summer(format), 0
    while done < format.fragments:
        done += summer.batch(done, maps.accumulators[_ROUND & 1], None, unit, out)
