# SPDX-License-Identifier: Apache-2.0
"""`compress(model, rank=R)` beside PowerSGD on Gloo: the time of a step of DDP above computing, in the same lab.

`python -m benchmarks.low_rank [--rate 1gbit] [--ranks 1,2,4] [--repeat 3] [--json]`. Two hosts have a core and a thread
each, and their agents the same core. PowerSGD has one bucket, as it needs on Gloo; `gradient_as_bucket_view` is set in
both. Ways take turns: `nicps`, `powersgd` as it is installed, and `powersgd-tuned`, in whose processes malloc keeps
what was freed instead of giving it back to the kernel. "Above" is the time of a step less that of computing without
DDP, at the slower rank; "processor" is the same of the rank's processor time, without its agent's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from typing import Any

import orjson

from nicps.bench.arguments import in_order, several, whole
from nicps.errors import EnvironmentProblem, JobFailed, NicpsError
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import environment, joined, open_folder
from nicps.rates import parse_rate

_HOSTS = 2
_BURST_BYTES = 16 * 1024  # the lab's own would let the factors through at any rate
_LIMIT_S = 300.0
#: glibc's: no mapping of its own for large pieces, and nothing given back.
_TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_WAYS = {
    "nicps": ("nicps", {}),
    "powersgd": ("powersgd", {}),
    "powersgd-tuned": ("powersgd", _TUNED),
}


def measure(lab: Lab, way: str, rank: int, args: argparse.Namespace, port: int) -> dict[str, Any]:
    """One start of both ranks; medians in seconds.

    Raises:
        JobFailed: a rank failed, or gradients differ.
    """
    name, variables = _WAYS[way]
    command = [sys.executable, "-m", "benchmarks.low_rank_rank", "--way", name]
    command += ["--low-rank", str(rank), "--width", str(args.width), "--steps", str(args.steps)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = []
    for k, host in enumerate(lab.hosts):
        env = {**environment(), "OMP_NUM_THREADS": "1", **variables}
        if name == "powersgd":
            env |= {"MASTER_ADDR": lab.hosts[0].ip, "MASTER_PORT": str(port)}
            env |= {"RANK": str(k), "WORLD_SIZE": str(_HOSTS)}
        process = lab.run(host, command, env=env, stdin=subprocess.DEVNULL, **pipes)
        os.sched_setaffinity(process.pid, {_cores()[k]})
        ranks.append(process)
    found = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=_LIMIT_S)
            if process.returncode:
                raise JobFailed(f"{way}: exit code {process.returncode}: {err[-500:]}")
            found.append(orjson.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    if len({each["gradients"] for each in found}) != 1:
        raise JobFailed(f"{way}: the ranks' gradients differ")
    computing = max(each["computing"][0] for each in found)
    step = max(each["step"][0] for each in found)
    used = max(each["step"][1] - each["computing"][1] for each in found)
    return {
        "way": way,
        "rank": rank,
        "computing": computing,
        "step": step,
        "above": step - computing,
        "processor": used,
    }


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def compare(args: argparse.Namespace) -> int:
    """Measure and print."""
    if len(_cores()) < _HOSTS:
        raise EnvironmentProblem(f"each of {_HOSTS} hosts needs a core: there is one")
    lines: list[dict[str, Any]] = []
    settings = LabSettings("low-rank", _HOSTS, args.rate, burst_bytes=_BURST_BYTES)
    with (
        open_folder("nicps-bench-") as folder,
        Lab(settings) as lab,
        joined(lab, lab.hosts, folder) as agents,
    ):
        for agent, core in zip(agents, _cores(), strict=False):
            for thread in os.listdir(f"/proc/{agent.process.pid}/task"):
                os.sched_setaffinity(int(thread), {core})
        port = 29500
        for turn in range(args.repeat):
            for rank in args.ranks:
                for way in _WAYS:
                    port += 1
                    line = {"turn": turn + 1, **measure(lab, way, rank, args, port)}
                    lines.append(line)
                    print(
                        f"rank {rank} {way:<15} step {line['step'] * 1e3:7.1f} ms, computing"
                        f" {line['computing'] * 1e3:6.1f} ms, above {line['above'] * 1e3:7.1f} ms,"
                        f" processor {line['processor'] * 1e3:6.1f} ms",
                        file=sys.stderr if args.json else sys.stdout,
                        flush=True,
                    )
    medians = []
    for rank in args.ranks:
        for way in _WAYS:
            same = [line for line in lines if (line["rank"], line["way"]) == (rank, way)]
            found = {f: statistics.median(line[f] for line in same) for f in ("above", "processor")}
            medians.append({"rank": rank, "way": way, **found})
    if args.json:
        print(orjson.dumps({"runs": lines, "medians": medians}).decode())
        return 0
    print("medians above computing:")
    for each in medians:
        print(
            f"rank {each['rank']} {each['way']:<15} {each['above'] * 1e3:7.1f} ms,"
            f" processor {each['processor'] * 1e3:6.1f} ms"
        )
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_rank", description=__doc__)
    parser.add_argument("--rate", type=parse_rate, default=parse_rate("1gbit"))
    parser.add_argument("--ranks", type=several(whole(1)), default=(1, 2, 4))
    parser.add_argument("--width", type=whole(2), default=1698, help="of each of four layers")
    parser.add_argument("--steps", type=whole(1), default=20)
    parser.add_argument("--repeat", type=whole(1), default=3)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    args = parser.parse_args()
    try:
        return in_order(compare)(args)
    except NicpsError as error:
        print(f"low_rank: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
