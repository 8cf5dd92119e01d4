# SPDX-License-Identifier: Apache-2.0
"""Networks of agents that several files share: starting four agents takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netns.members import Network


@pytest.fixture(scope="session")
def session_network() -> Iterator[Network]:
    """Four hosts; use `network`."""
    made = Network(4)
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture
def network(session_network: Network) -> Network:
    """Four hosts whose agents all stand by."""
    session_network.ready()
    return session_network
