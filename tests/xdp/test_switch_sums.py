# SPDX-License-Identifier: Apache-2.0
"""A switch's sums as they come in: the messages that wake the agent, and its readings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nicps.dataplane.doorbell import Bell, Doorbell
from nicps.dataplane.maps import Maps
from tests.xdp.kernel import VIEW, Kernel, fragment, kernel

FRAGMENTS = 8
CLOCK = 3


@dataclass(frozen=True)
class Host:
    """A kernel, and the ring that wakes its agent."""

    kernel: Kernel
    doorbell: Doorbell

    @property
    def maps(self) -> Maps:
        """The kernel's."""
        return self.kernel.maps


@pytest.fixture(scope="module")
def loaded() -> Iterator[Host]:
    with kernel() as program:
        yield Host(program, Doorbell(program.fds["doorbell"]))


@pytest.fixture
def host(loaded: Host) -> Host:
    """A switch adds, and nothing has come."""
    loaded.kernel.reset(blocks=2)
    loaded.maps.config["sums"] = loaded.maps.config["sums_next"] = 1
    loaded.maps.config["clock"] = CLOCK
    loaded.doorbell.take()
    return loaded


def give(host: Host, *indices: int, sender: int = 0, round_: int = 1) -> None:
    for index in indices:
        host.kernel.run(
            fragment(
                bytes(1440),
                width=32,
                sender=sender,
                index=index,
                fragments=FRAGMENTS,
                round_=round_,
            )
        )


@pytest.mark.parametrize("clock", [0, CLOCK])
def test_the_agent_hears_of_some_sums_and_of_the_last(host: Host, clock: int) -> None:
    host.maps.config["clock"] = clock
    give(host, *range(FRAGMENTS), *range(FRAGMENTS), round_=2)
    told = [3, 6, FRAGMENTS] if clock else [FRAGMENTS]
    assert host.doorbell.take() == [Bell(VIEW << 32 | 2, 0, count, FRAGMENTS, 0) for count in told]


def test_fragments_of_members_do_not_wake_the_agent(host: Host) -> None:
    host.maps.config["sums"] = 0
    give(host, *range(FRAGMENTS), sender=2)
    assert host.maps.count(1, VIEW, 2) == FRAGMENTS and host.doorbell.take() == []


def test_how_far_sums_have_come(host: Host) -> None:
    """Also those of the next round, which another phase may have."""
    maps = host.maps
    give(host, 0, 1, 3, 6)
    give(host, 2, round_=2)
    assert maps.reached(1, VIEW, 0, FRAGMENTS) == (2, 7)
    assert maps.reached(1, VIEW, 3, 4) == (4, 4) and maps.reached(1, VIEW, 4, 6) == (4, 4)
    assert maps.missing_sums(1, VIEW, 1, FRAGMENTS, 2) == [(2, 1), (4, 2)]
    assert maps.reached(2, VIEW, 2, 5) == (3, 3)
    assert maps.reached(1, VIEW + 1, 0, 3) == (0, 0) == maps.reached(3, VIEW, 0, 3)
    maps.config["sums_next"] = 0
    assert maps.reached(2, VIEW, 2, 5) == (2, 2), "stripes, of which there is no room"
    assert maps.missing_sums(2, VIEW, 2, 5, 9) == [(2, 3)]
