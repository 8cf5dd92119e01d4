# SPDX-License-Identifier: Apache-2.0
"""Networks of agents that several files share: starting four agents takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netns.members import DEFAULTS, Network
from tests.netns.warm import started_warm


def pytest_configure(config: pytest.Config) -> None:
    """Jobs that name no exchange take that of `--exchange`."""
    DEFAULTS["exchange"] = config.getoption("exchange")


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Agents and commands that labs start need no imports."""
    with started_warm():
        yield


@pytest.fixture(scope="session")
def session_network() -> Iterator[Network]:
    """Four hosts; use `network`."""
    with Network(4) as made:
        made.up()
        yield made


@pytest.fixture
def network(session_network: Network) -> Network:
    """Four hosts whose agents all stand by."""
    session_network.ready()
    return session_network


@pytest.fixture(scope="module")
def module_network() -> Iterator[Network]:
    """Three hosts; use `three`."""
    with Network(3) as made:
        made.up()
        yield made


@pytest.fixture
def three(module_network: Network) -> Network:
    """Three hosts whose agents all stand by."""
    module_network.ready()
    return module_network
