# SPDX-License-Identifier: Apache-2.0
"""Fixtures of unit tests with PyTorch, which is imported by the tests that need it only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.overlapped import Slow
    from tests.pending import Scene


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread, as a training program does: a second one can change bits, and spins when idle."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def scene() -> Scene:
    """A model with pending parameters, and its twin."""
    from tests.pending import Scene

    return Scene()


@pytest.fixture
def unwarned() -> Iterator[None]:
    """A warning that the test does not expect is an error."""
    from tests.pending import no_other_warning

    with no_other_warning():
        yield


@pytest.fixture(scope="module")
def gloo() -> Iterator[None]:
    """The process group of one process, which DDP needs."""
    from tests.overlapped import process_group

    with process_group():
        yield


@pytest.fixture
def group() -> Iterator[Slow]:
    """A group of one whose sums take their time."""
    from tests.overlapped import slow_group

    with slow_group() as made:
        yield made
