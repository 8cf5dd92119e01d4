# SPDX-License-Identifier: Apache-2.0
"""Markers that probe for what they need, and the fixtures that all tests share.

A test in tests/unit, tests/xdp, tests/netns, tests/p4 or tests/vm gets its folder's marker by
itself, unless it has it by hand: `@pytest.mark.p4("p4c-bm2-ss")` names what is needed in place of
BMv2. With NICPS_NO_SKIPS=1 a skipped unit, xdp or netns test fails the run (`.ci/run` sets it for
root), and a p4 test where both BMv2 and the compiler are installed.

`make test` runs the files in parallel (pytest-xdist): all tests of a file in one worker, since they share
labs. Files that mostly wait come before files that mostly compute, and one worker begins with the latter. It takes
what processor time the labs leave.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from nicps.programs import PACKAGES, find_program, missing_programs
from tests.reaper import fresh_folder

# Two processors run many programs that import NumPy. Its threads would wait for work, busily, in each of them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
MUST_RUN = frozenset({"unit", "xdp", "netns"})
BMV2, P4C = "simple_switch", "p4c-bm2-ss"
CLONE_NEWNET = 0x40000000
SKIPPED = "nicps-skipped"
HANG_UP = "nicps-hang-up"
HANGS_UP = pytest.StashKey[bool]()  # whether a hang-up is to end the tests
EXCHANGES = ("broadcast", "stripes", "auto", "switch")  # switch: a Linux switch
NO_SKIPS = os.environ.get("NICPS_NO_SKIPS", "") not in ("", "0")

#: Says what is missing, or None.
Probe = Callable[..., str | None]

#: The folders in the order in which their files are handed to workers, to the last one from the end. Labs wait most
#: of the time: what is started first overlaps best, and short unit tests fill the gaps and the end.
ORDER = ("netns", "p4", "vm", "xdp", "unit")
LOW = 15  # priority of a unit test beside labs


def needed(missing: Sequence[str]) -> str | None:
    """The reason to skip, if anything is missing."""
    return f"needs {' and '.join(missing)}" if missing else None


@functools.cache
def missing_for_netns() -> str | None:
    """Root, the programs that tests call, and a new network namespace, made in a child that ends at once."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := missing_programs("ip", "tc", "ping", "unshare", "nsenter"):
        return needed(missing)
    child = os.fork()
    if child == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0 else 1)
    _, status = os.waitpid(child, 0)
    return "cannot make network namespaces" if status else None


@functools.cache
def missing_for_xdp() -> str | None:
    """Root, BCC, kernel headers and a network namespace to attach in."""
    if os.geteuid() != 0:
        return "needs root"
    if importlib.util.find_spec("bcc") is None:
        return "needs BCC (python3-bpfcc)"
    from nicps.doctor import check_headers

    headers = check_headers()
    if headers.state == "fail":
        return f"needs kernel headers: {headers.found}"
    return missing_for_netns()


def installed(name: str) -> bool:
    """Whether there is a program or a Python module of that name."""
    return find_program(name) is not None or importlib.util.find_spec(name) is not None


@functools.cache
def missing_for_p4(*needs: str) -> str | None:
    """The programs and modules that the marker names, or BMv2's simple switch; with that its Python modules."""
    needs = needs or (BMV2,)
    absent = missing_programs(*(name for name in needs if name in PACKAGES))
    modules = [name for name in needs if name not in PACKAGES]
    absent += [name for name in modules if importlib.util.find_spec(name) is None]
    if BMV2 in needs:
        from nicps.switch.runtime import missing_modules

        absent += missing_modules()
    if absent:
        return needed(absent)
    return missing_for_xdp() if BMV2 in needs else None


@functools.cache
def missing_for_vm() -> str | None:
    """Root, QEMU, virtme-ng to start it, and what that needs: as vm-lab itself finds out."""
    if os.geteuid() != 0:
        return "needs root"
    sys.path.insert(0, str(ROOT / "vm-lab"))
    from machines import PROGRAMS

    return needed(missing_programs(*PROGRAMS))


@functools.cache
def missing_for_spark() -> str | None:
    """What `make setup-spark` installs."""
    absent = missing_programs("java")
    if importlib.util.find_spec("pyspark") is None:
        absent.append("pyspark (make setup-spark)")
    return needed(absent)


PROBES: dict[str, Probe] = {
    "xdp": missing_for_xdp,
    "netns": missing_for_netns,
    "p4": missing_for_p4,
    "vm": missing_for_vm,
    "spark": missing_for_spark,
}


def folder_of(item: pytest.Item) -> str:
    """The folder below tests/ that a test is in."""
    return item.path.relative_to(ROOT / "tests").parts[0]


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Of a test with parameters, all that its marker `short` does not name.

    Raises:
        pytest.UsageError: it names parameters that are not there.
    """
    named: dict[tuple[Path, str], set[str]] = {}
    for item in items:
        short = item.get_closest_marker("short")
        if short is not None and isinstance(item, pytest.Function):
            left = named.setdefault((item.path, item.originalname), set(short.args))
            if item.callspec.id in short.args:
                left.discard(item.callspec.id)
            else:
                item.add_marker("long")
    if unknown := [f"{name}[{id}]" for (_, name), left in named.items() for id in sorted(left)]:
        raise pytest.UsageError(f"mark.short names what is not there: {', '.join(unknown)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its folder's marker, if it has none, and put the folders in order."""
    if not any("::" in argument for argument in config.args):
        mark_long(items)
    for item in items:
        folder = folder_of(item)
        if folder in {"unit", *PROBES} and item.get_closest_marker(folder) is None:
            item.add_marker(folder)
    rank = {folder: at for at, folder in enumerate(ORDER)}
    items.sort(key=lambda item: rank.get(folder_of(item), len(ORDER)))


class Spread(LoadFileScheduling):
    """The tests of one file run in one worker, as they share labs; those of the simulator share nothing.

    Of three workers or more the last begins at the other end: labs wait and units compute, so that one has something
    to do for a processor while the others wait.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        nodes = self.nodes
        if len(nodes) > 2 and node is nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if file.startswith("tests/unit/test_simulator") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Spread:
    """Who runs what, with `-n`."""
    return Spread(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Beside other workers a unit test yields to labs, whose hosts must answer in time; only root can take it back."""
    if hasattr(item.config, "workerinput") and os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, LOW if folder_of(item) == "unit" else 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--exchange`: rows of docs/faults.md in another exchange than that which they name."""
    parser.addoption(
        "--exchange",
        choices=EXCHANGES,
        default=EXCHANGES[0],
        help="of jobs with real agents whose test names none (broadcast)",
    )


def other_exchange(item: pytest.Item) -> str | None:
    """The reason to skip a test that does not apply to the exchange of `--exchange`; None if it applies."""
    marker = item.get_closest_marker("needs_exchange")
    if marker is None or item.config.getoption("exchange") == marker.args[0]:
        return None
    return f"exchange {marker.args[0]}: {marker.args[1]}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marker's probe finds something missing, or that presupposes another exchange."""
    if (reason := other_exchange(item)) is not None:
        pytest.skip(reason)
    for name, probe in PROBES.items():
        marker = item.get_closest_marker(name)
        if marker is not None:
            missing = probe(*marker.args)
            if missing is not None:
                pytest.skip(f"{name}: {missing}")


def must_run(item: pytest.Item) -> bool:
    """Whether a skip of that test shows that this machine cannot be relied on."""
    if item.get_closest_marker("spark") is not None or other_exchange(item) is not None:
        return False
    p4 = item.get_closest_marker("p4")
    if p4 is not None:
        return all(map(installed, (BMV2, P4C, *p4.args)))
    return any(item.get_closest_marker(name) is not None for name in MUST_RUN)


class SkipGuard:
    """Turns skips of the tests that must run into a failed session.

    With pytest-xdist each worker collects and runs tests, and the controller decides on the exit code: what a
    worker knows travels in its reports and in its last message.
    """

    def __init__(self) -> None:
        self.skipped: dict[str, None] = {}  # node ids, each once, in order

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail") and must_run(item):
            report.user_properties.append((SKIPPED, True))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (SKIPPED, True) in map(tuple, report.user_properties):
            self.skipped[report.nodeid] = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus in (pytest.ExitCode.OK, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[SKIPPED] = list(self.skipped)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.skipped |= dict.fromkeys(getattr(node, "workeroutput", {}).get(SKIPPED, ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self.skipped:
            terminalreporter.write_line(f"NICPS_NO_SKIPS: {nodeid} was skipped", red=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker does not see what its controller was started with."""
    node.workerinput[HANG_UP] = node.config.stash[HANGS_UP]


def pytest_configure(config: pytest.Config) -> None:
    """Put the guard in where skips are not allowed, and see to it that signals work in what tests start.

    A shell without job control starts background commands with SIGINT ignored, `nohup` with SIGHUP ignored, and a
    process hands an ignored signal on to whatever it starts; a handler it does not. Python then installs its own for
    SIGINT at the start of each child. A hang-up that was to be ignored still ends no test process.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    told = getattr(config, "workerinput", {})
    hangs_up = told.get(HANG_UP, signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)
    config.stash[HANGS_UP] = hangs_up
    if not hangs_up:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if NO_SKIPS:
        config.pluginmanager.register(SkipGuard(), "nicps-skip-guard")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture
def open_path() -> Iterator[Path]:
    """An empty folder that every user may enter (pytest's own tmp_path is its user's only)."""
    path = fresh_folder()
    yield path
    shutil.rmtree(path, ignore_errors=True)
