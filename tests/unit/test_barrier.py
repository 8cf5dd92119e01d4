# SPDX-License-Identifier: Apache-2.0
"""The memory barrier of processors that may exchange two accesses, on whatever processor this is."""

from __future__ import annotations

import platform

import pytest

from nicps import barrier

NUMBERS = {"x86_64": 324, "s390x": 356, **barrier._SYSCALL}


@pytest.fixture
def machine() -> str:
    """This one's name, where the system call's number is known."""
    name = platform.machine()
    if name not in NUMBERS:
        pytest.skip(f"membarrier(2) has no known number on {name}")
    return name


def test_the_kernel_has_it(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "_NUMBER", NUMBERS[machine])
    barrier.barrier()


def test_one_that_is_refused_is_no_barrier(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "_NUMBER", NUMBERS[machine])
    monkeypatch.setattr(barrier, "_GLOBAL_EXPEDITED", 1 << 30)
    with pytest.raises(OSError, match="membarrier: Invalid argument"):
        barrier.barrier()
