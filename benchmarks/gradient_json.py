# SPDX-License-Identifier: Apache-2.0
"""Time of a gradient of 1 M float32 to JSON and back: `python -m benchmarks.gradient_json`."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from nicps import gradient_json


def measure(parameters: int, repeats: int) -> dict[str, float | int | bool]:
    """Median and worst seconds of `dumps` and `loads` together, and whether every bit came back."""
    gradient = np.random.default_rng(0).standard_normal(parameters).astype(np.float32) / 1000
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        text = gradient_json.dumps({"weight": gradient}, samples=512)
        back, _samples = gradient_json.loads(text, {"weight": gradient.shape})
        seconds.append(time.perf_counter() - start)
    return {
        "parameters": parameters,
        "bytes": len(text),
        "seconds_median": statistics.median(seconds),
        "seconds_max": max(seconds),
        "bit_exact": back["weight"].tobytes() == gradient.tobytes(),
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.parameters, arguments.repeats)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:15}", f"{value:.3f}" if isinstance(value, float) else value)
    return 0 if figures["bit_exact"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
