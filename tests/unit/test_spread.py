# SPDX-License-Identifier: Apache-2.0
"""How `make test` hands tests to its workers: labs and unit tests beside each other, the simulator's at the end."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import ROOT, Spread, pytest_collection_modifyitems

LABS = [f"tests/netns/test_{name}.py" for name in "abc"]
UNITS = [f"tests/unit/test_{name}.py" for name in "abc"]
SEEDS = [f"tests/unit/test_simulator.py::test_seeds[{seed}]" for seed in range(2)]


class Worker:
    """One that is told what to run."""

    def send_runtest_some(self, indices: list[int]) -> None:
        """As xdist's, by the place in what it has collected."""


def spread(workers: list[Worker], queue: list[str]) -> Any:
    """The scheduler once all workers have collected these units, of one test each."""
    made: Any = object.__new__(Spread)
    made.workqueue = OrderedDict((unit, {unit: False}) for unit in queue)
    made.assigned_work = {worker: {} for worker in workers}
    made.registered_collections = dict.fromkeys(workers, queue)
    return made


def given(scheduler: Any, worker: Worker) -> str:
    """What that worker gets next."""
    scheduler._assign_work_unit(cast(Any, worker))
    return str(next(reversed(scheduler.assigned_work[worker])))


@pytest.mark.parametrize("count", [3, 4])
def test_the_last_worker_takes_unit_tests_and_then_what_the_others_take(count: int) -> None:
    workers = [Worker() for _ in range(count)]
    scheduler = spread(workers, [*LABS, *SEEDS, *UNITS])
    assert [given(scheduler, workers[-1]) for _ in UNITS] == UNITS[::-1]
    assert [given(scheduler, workers[k]) for k in (0, -1, 1)] == LABS
    assert [given(scheduler, workers[-1]) for _ in SEEDS] == SEEDS


def test_of_two_workers_both_begin_with_labs() -> None:
    workers = [Worker(), Worker()]
    scheduler = spread(workers, [*LABS, *SEEDS, *UNITS])
    assert [given(scheduler, worker) for worker in workers] == LABS[:2]


def item(nodeid: str) -> Any:
    """A test, as far as the order asks it."""
    path = ROOT / nodeid.partition("::")[0]
    return SimpleNamespace(
        nodeid=nodeid, path=path, get_closest_marker=lambda name: name, add_marker=None
    )


def test_the_order_is_labs_the_simulators_and_other_unit_tests() -> None:
    tests = [f"{file}::test_it" for file in (*UNITS[:1], *LABS, *UNITS[1:])] + SEEDS
    items = [item(nodeid) for nodeid in tests]
    pytest_collection_modifyitems(cast(Any, SimpleNamespace(args=["one::test"])), items)
    named = [each.nodeid.removesuffix("::test_it") for each in items]
    assert named == [*LABS, *SEEDS, *UNITS]
