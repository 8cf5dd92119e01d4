# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed against the backend, on four hosts.

    python -m tests.netns.distributed_suite --out benchmarks/distributed_test.tsv

PyTorch's wheel has them: `torch/testing/_internal/distributed/distributed_test.py`. They start all ranks on one host.
Here each rank is forked, and enters the network namespace of its host, where an agent runs, before it joins.

The file's conditions name the backends that they apply to. It is loaded with a name that compares equal to "gloo". So
all tests for Gloo run here, without the conditions that let only MPI or NCCL through.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

RANKS = 4
SUITE = "torch.testing._internal.distributed.distributed_test"
_LIMIT_S = 120

NOT_HERE = "not ours: "
#: Errors that the backend cannot avoid.
NOT_OURS = {
    "monitored_barrier is only implemented for GLOO": "torch refuses it for any backend that is not called gloo",
    "ProcessGroupGloo::alltoall: invalid tensor size": "a subgroup is Gloo's, which takes tensors of one size only",
}
#: The reasons for which a test may be skipped: a GPU, or a subject other than this backend or machine.
_REASONS = (
    r"Need at least \d CUDA devices?",
    r"CUDA is not available\.",
    r"c10d was not compiled with the NCCL backend",
    r"NCCL (Batch )?Send Recv Only",
    r"Test requires backend nicps to be one of \{'nccl'\}",
    r"Only NCCL backend supports high priority stream",
    r"Tests nccl metadata primarily\.",
    r"no torchvision",
    r"https://github.com/pytorch/pytorch/issues/\d+",  # PyTorch's own, for all backends
    r"Test is failing, see https://github.com/.*",
    r"Skipped due to flakiness",
)


class Ours(str):
    """The backend's name, which the file's conditions take for Gloo's."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")

    def __str__(self) -> str:
        return str.__str__(self)


def load() -> types.ModuleType:
    """PyTorch's file, with ours in its lists of backends."""
    tempfile.tempdir = folder = tempfile.mkdtemp(prefix="nicps-suite-")  # each test leaves a file
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update(
        TMPDIR=folder,
        BACKEND="nicps",
        WORLD_SIZE=str(RANKS),
        INIT_METHOD=f"file://{folder}/rendezvous",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_LIMIT_S),
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",  # it would become a part of each error
    )
    import torch
    from torch.testing._internal import common_distributed

    import nicps.torch

    assert nicps.torch.ProcessGroupNicps
    torch.set_num_threads(1)
    for feature in common_distributed.DistTestCases.backend_feature.values():
        feature.add("nicps")
    # Groups of two of the ranks, skipped with fewer than eight: four are enough for them.
    common_distributed.skip_if_small_worldsize = lambda test: test
    spec = find_spec(SUITE)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    text = text.replace('BACKEND = os.environ["BACKEND"]', "BACKEND = __ours__", 1)
    text = re.sub(r'BACKEND != "mpi"(?=, "Only MPI supports)', "False", text)
    text = re.sub(r'BACKEND != "nccl"(?= or IS_FBCODE)', "False", text)
    text = re.sub(
        r'BACKEND != "nccl", "Only N(?:CCL|ccl) supports [^"]*"',
        'not torch.cuda.is_available(), "CUDA is not available."',
        text,
    )
    module = types.ModuleType(SUITE)
    module.__dict__.update(__ours__=Ours("nicps"), __file__=spec.origin)
    sys.modules[SUITE] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    for name in (
        "PROFILING_SUPPORTED_BACKENDS",
        "CUDA_PROFILING_SUPPORTED_BACKENDS",
    ):
        getattr(module, name).append("nicps")
    return module


def wait_for_agents(lab: str) -> None:
    """Wait until all stand by: the ranks of the test before may have left without LEAVE frames."""
    from nicps.lab import namespaces
    from nicps.session.channel import DEFAULT_SOCKET, Channel
    from nicps.session.commands import ask
    from nicps.session.messages import AskStatus, Status

    def state() -> str:
        channel = Channel.connect(DEFAULT_SOCKET)
        try:
            return ask(channel, AskStatus(), Status, 10.0).state
        finally:
            channel.close()

    deadline = time.monotonic() + _LIMIT_S
    for number in range(1, RANKS + 1):
        while namespaces.inside(namespaces.host_name(lab, f"h{number}"), state) != "standby":
            assert time.monotonic() < deadline, f"h{number} does not stand by"
            time.sleep(0.02)


def tests_on(lab: str, verbose: bool) -> type[unittest.TestCase]:
    """The class of all tests, with ranks on the hosts of that lab."""
    from nicps.lab import enter, namespaces

    module = load()
    from torch import distributed as dist
    from torch import multiprocessing
    from torch.testing._internal.common_distributed import TEST_SKIPS

    SKIPS = {skip.exit_code for skip in TEST_SKIPS.values()}

    class TestNicps(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *arguments: Any, **options: Any) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            enter.enter(namespaces.host_name(lab, f"h{rank + 1}"))
            if not verbose:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            try:
                super()._run(rank, *arguments, **options)
            except SystemExit as end:
                if end.code in SKIPS and dist.is_initialized():  # at all ranks alike
                    dist.destroy_process_group()
                raise

        def call_dist_op(self, title: str, *arguments: Any, **options: Any) -> None:
            """Names of a profiler's events of Gloo, in a subgroup or for us."""
            groups = [*arguments, *options.values()]
            if title == ":all_to_all" or any(
                isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD
                for group in groups
            ):
                options["expect_event"] = False
            super().call_dist_op(title, *arguments, **options)

    return TestNicps


def is_a_reason(why: str) -> bool:
    """Whether a test may be skipped for that reason."""
    return any(re.fullmatch(each, why) for each in _REASONS)


def names_of(tests: type[unittest.TestCase]) -> list[str]:
    """All tests."""
    return unittest.defaultTestLoader.getTestCaseNames(tests)


def outcome(tests: type[unittest.TestCase], name: str) -> dict[str, Any]:
    """Run one."""
    result = unittest.TestResult()
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        tests(name).run(result)
    seconds = round(time.monotonic() - began, 2)
    if result.skipped:
        return {"test": name, "outcome": "skipped", "why": result.skipped[0][1], "seconds": seconds}
    bad = [*result.failures, *result.errors]
    if bad:
        return {"test": name, "outcome": "failed", "why": bad[0][1], "seconds": seconds}
    return {"test": name, "outcome": "passed", "why": "", "seconds": seconds}


@contextlib.contextmanager
def hosts(lab: str) -> Iterator[str]:
    """That lab, or one of its own with agents."""
    if lab:
        yield lab
        return
    from tests.netns.members import Network

    with Network(RANKS) as network:
        network.up()
        yield network.lab.name


def last_error(text: str) -> str:
    """The message of an error, in one line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    begins = [
        at
        for at, line in enumerate(lines)
        if re.match(r"[\w.]*(Error|Exception|Timeout\w*|Problem|Failed)\b", line)
    ]
    return " ".join(lines[begins[-1] if begins else -1 :])[:400]


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A line a test, by name. Lines of other tests that are there already stay."""
    lines = {}
    if path.exists():
        lines = {line.partition("\t")[0]: line for line in path.read_text().splitlines()[2:]}
    lines |= {row["test"]: "\t".join((row["test"], row["outcome"], row["why"])) for row in rows}
    table = "".join(f"{lines[name]}\n" for name in sorted(lines))
    path.write_text(f"# SPDX-License-Identifier: Apache-2.0\ntest\toutcome\twhy\n{table}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="regular expressions; all if none")
    parser.add_argument("--lab", default="", help="a lab with agents that stand by")
    parser.add_argument(
        "--out", type=Path, help="a table of outcomes; those of other tests in it stay"
    )
    parser.add_argument("--verbose", action="store_true", help="whole errors")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab goes, too
    rows = []
    with hosts(args.lab) as lab:
        tests = tests_on(lab, args.verbose)
        for name in names_of(tests):
            if args.tests and not any(re.fullmatch(each, name) for each in args.tests):
                continue
            wait_for_agents(lab)
            row = outcome(tests, name)
            if args.verbose and row["outcome"] == "failed":
                print(row["why"], file=sys.stderr, flush=True)
            row["why"] = last_error(row["why"])
            for error, reason in NOT_OURS.items():
                if error in row["why"]:
                    row["why"] = f"{NOT_HERE}{reason}: {row['why']}"
            print(orjson.dumps(row).decode(), flush=True)
            rows.append(row)
    if args.out:
        write_table(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
