# SPDX-License-Identifier: Apache-2.0
"""A switch for three hosts, of which each is at the port of its number."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nicps.bench.bmv2 import CONTROLLER, Bmv2
from nicps.lab.namespaces import switch_name
from nicps.switch import Switch
from nicps.switch.runtime import Member
from tests.p4.bmv2 import Wires, bench
from tests.p4.frames import HOSTS, NETWORK, mac


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Bmv2, Wires]]:
    with bench(switch_name(f"test-{os.getpid()}-p4"), len(HOSTS)) as both:
        yield both


@pytest.fixture
def switch(made: tuple[Bmv2, Wires]) -> Iterator[Switch]:
    """Set up for three hosts, each at the port of its number; nothing has passed yet."""
    with made[0].connect() as switch:
        switch.setup(NETWORK, HOSTS, CONTROLLER)
        switch.record({k: Member(k, mac(k), k) for k in HOSTS})
        yield switch


@pytest.fixture
def wires(made: tuple[Bmv2, Wires]) -> Wires:
    return made[1]
