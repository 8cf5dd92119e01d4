# SPDX-License-Identifier: Apache-2.0
"""The tutorial's DDP script on Gloo, with two lines changed on nicps, and with one more in lanes of 8 bits.

`python -m benchmarks.ddp_script --data PATH [--hosts 4] [--rate 1gbit] [--repeat 3] [--json]` starts
docs/examples/ddp/mnist_gloo.py and mnist.py in turn in one lab, one process on each host. It prints the seconds of
their training, the accuracy, and whether all ranks have the same weights.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.rendezvous import gloo_variables
from nicps.bench.arguments import as_type, host_count, whole
from nicps.errors import JobFailed
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import environment, joined, open_folder
from nicps.rates import parse_rate

_EXAMPLES = Path(__file__).parents[1] / "docs" / "examples" / "ddp"
_LIMIT_S = 1800.0
_SECONDS = re.compile(r"^epoch \d+: loss [\d.]+, ([\d.]+) s$", re.MULTILINE)
_WRAPPED = "    model = DistributedDataParallel(network())\n"
_END = re.compile(r"^rank \d+ of \d+: ([\d.]+)%, weights (\w+)$", re.MULTILINE)


def run_script(
    lab: Lab, script: Path, arguments: list[str], variables: list[Mapping[str, str]]
) -> dict[str, Any]:
    """Start it on every host; what came of it.

    Raises:
        JobFailed: a rank failed.
    """
    command = [sys.executable, str(script), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        lab.run(
            host,
            command,
            env={**environment(), "OMP_NUM_THREADS": "1", **extra},
            stdin=subprocess.DEVNULL,
            **pipes,
        )
        for host, extra in zip(lab.hosts, variables, strict=True)
    ]
    seconds, accuracies, weights = [], [], set()
    try:
        for process in ranks:
            out, err = process.communicate(timeout=_LIMIT_S)
            ended = _END.search(out)
            if process.returncode or ended is None:
                raise JobFailed(f"{script.name}: exit code {process.returncode}: {err[-500:]}")
            seconds.append(float(_SECONDS.findall(out)[-1]))
            accuracies.append(float(ended[1]) / 100)
            weights.add(ended[2])
    finally:
        for process in ranks:
            process.kill()
    return {
        "seconds": max(seconds),
        "accuracy": min(accuracies),
        "weights_identical": len(weights) == 1,
    }


def _compressed(script: Path, folder: Path) -> Path:
    """The same script with gradients in lanes of 8 bits: one more line."""
    text = script.read_text()
    assert _WRAPPED in text
    copy = folder / "mnist_i8.py"
    copy.write_text(
        text.replace(_WRAPPED, f'{_WRAPPED}    nicps.torch.compress(model, lane="i8")\n')
    )
    return copy


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp_script", description=__doc__)
    parser.add_argument("--data", required=True, help="the folder with mnist/")
    parser.add_argument("--hosts", type=host_count(), default=4)
    parser.add_argument("--rate", type=as_type(parse_rate), default="1gbit")
    parser.add_argument("--epochs", type=whole(1), default=3)
    parser.add_argument("--repeat", type=whole(1), default=3)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    with (
        open_folder("nicps-bench-") as folder,
        Lab(LabSettings("ddp-script", args.hosts, args.rate)) as lab,
        joined(lab, lab.hosts, folder),
    ):
        rendezvous = gloo_variables(lab)
        ours, inherited = _EXAMPLES / "mnist.py", [{}] * args.hosts
        ways = {
            "gloo": (_EXAMPLES / "mnist_gloo.py", rendezvous),
            "nicps": (ours, inherited),
            "i8": (_compressed(ours, folder), inherited),
        }
        arguments = ["--data", str(Path(args.data) / "mnist"), "--epochs", str(args.epochs)]
        for turn in range(args.repeat):
            for name, (script, variables) in ways.items():
                line = {
                    "way": name,
                    "turn": turn + 1,
                    **run_script(lab, script, arguments, variables),
                }
                lines.append(line)
                print(
                    f"{name:<8} {line['seconds']:7.1f} s  accuracy {line['accuracy']:.2%}  "
                    f"weights {'identical' if line['weights_identical'] else 'DIFFER'}",
                    file=sys.stderr if args.json else sys.stdout,
                    flush=True,
                )
    medians = {
        name: statistics.median(line["seconds"] for line in lines if line["way"] == name)
        for name in ways
    }
    if args.json:
        print(orjson.dumps({"runs": lines, "seconds_median": medians}).decode())
    else:
        print("medians: " + ", ".join(f"{name} {value:.1f} s" for name, value in medians.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
