# SPDX-License-Identifier: Apache-2.0
"""The switch of the benchmarks and tests: two at once, and when it cannot be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nicps.bench.bmv2 import Bmv2
from nicps.errors import EnvironmentProblem
from nicps.lab import links, namespaces
from nicps.switch.runtime import Program
from tests.reaper import fresh_name


@pytest.fixture
def netns() -> Iterator[str]:
    name = namespaces.switch_name(fresh_name())
    namespaces.create([name])
    yield name
    namespaces.remove([name])


def test_two_at_once(netns: str) -> None:
    """Each in a namespace of its own: they share no address."""
    other = namespaces.switch_name(fresh_name())
    namespaces.create([other])
    try:
        for name in (netns, other):
            links.with_netlink(name, lambda ipr: ipr.link("set", index=1, state="up"))
        with Bmv2(netns, {}) as first, Bmv2(other, {}) as second:
            assert first.connect().info().runs is second.connect().info().runs is Program.OURS
    finally:
        namespaces.remove([other])


@pytest.mark.parametrize("error", [EnvironmentProblem, KeyboardInterrupt])
def test_what_fails_while_it_starts_leaves_no_process(
    netns: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python module is missing, or the user has had enough."""
    bmv2 = Bmv2(netns, {})

    def fail() -> None:
        assert bmv2.process.poll() is None
        raise error("on purpose")

    monkeypatch.setattr(bmv2, "connect", fail)
    try:
        with pytest.raises(error), bmv2:
            pass
        assert bmv2.process.returncode is not None
    finally:
        bmv2.process.kill()
        bmv2.process.wait(10.0)
