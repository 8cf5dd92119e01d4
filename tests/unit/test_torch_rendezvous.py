# SPDX-License-Identifier: Apache-2.0
"""Several rendezvous of one process: RPC beside a process group, and a second process group (docs/pytorch.md)."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from nicps.collective import Group, GroupClosed  # noqa: E402
from nicps.torch import join  # noqa: E402
from nicps.torch.tcp import Tcp  # noqa: E402
from tests.collectives import Meeting, together  # noqa: E402


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started by hand."""
    given = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "NICPS_WEIGHTS")
    for name in (*given, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(join, "_given", set())
    monkeypatch.setattr(join, "_met", [], raising=False)
    monkeypatch.setattr(join, "_formed", [])


def formed(monkeypatch: pytest.MonkeyPatch, *groups: Any) -> list[tuple[int, int | None]]:
    """Let these be formed, one after the other; with which size and rank they are."""
    asked: list[tuple[int, int | None]] = []
    next_one = iter(groups)

    def form(size: int, rank: int | None, timeout: timedelta) -> Any:
        asked.append((size, rank))
        return next(next_one), Tcp("threads")

    monkeypatch.setattr(join, "form_with_tcp", form)
    return asked


def group_of(rank: int, size: int, **others: Any) -> Any:
    """One that is under way."""
    known: dict[str, Any] = {"lost": (), "out": False, "late": False, "parted": False}
    return SimpleNamespace(rank=rank, size=size, **{**known, **others})


class Asked:
    """A store that notes its keys."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def ask(self, what: str, keys: list[str], *_: Any, **__: Any) -> Any:
        self.keys += keys
        return SimpleNamespace(values=[b""], amount=0)


def ends(group: Any, lost: tuple[int, ...] = (), *, parted: bool) -> None:
    """`destroy_process_group`, or an end without the others."""
    group.lost, group.out, group.parted = lost, True, parted


def test_rpc_has_no_rank_of_its_own_where_the_script_says_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`init_rpc` puts RANK into the URL, which an agent has given; and a process is in one group only."""
    store = Asked()
    asked = formed(monkeypatch, group_of(1, 3, store=store))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    timeout = timedelta(minutes=1)
    _, *first = next(dist.rendezvous("env://", timeout=timeout))
    join.take(*first, timeout)
    options = SimpleNamespace(init_method="env://")
    rpc = _create(options)
    rpc.set_timeout(timedelta(seconds=1))
    rpc.set("name", "worker")
    assert first == [1, 3] and asked == [(0, None)]
    assert store.keys == ["rendezvous 2/name"]


def _create(options: Any) -> Any:
    from torch.distributed.rendezvous import _create_store_from_options

    return _create_store_from_options(options, -1)


def test_a_rank_that_a_script_says_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an agent has given the same one."""
    monkeypatch.setattr(join, "_given", {"1"})
    for name, value in (("MASTER_ADDR", "localhost"), ("RANK", "1"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="MASTER_PORT expected"):
        next(dist.rendezvous("env://", 1, 3, timeout=timedelta(minutes=1)))


def test_a_process_group_behind_rpc_takes_the_group_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of(0, 2)
    asked = formed(monkeypatch, group)
    _create(SimpleNamespace(init_method="env://"))
    _, rank, size = next(dist.rendezvous("env://", timeout=timedelta(minutes=1)))
    assert join.take(rank, size, timedelta(minutes=1))[0] is group
    assert asked == [(0, None)] and not join._formed


@pytest.mark.parametrize("says", [{}, {"WORLD_SIZE": "3"}, {"WORLD_SIZE": "3", "RANK": "2"}])
def test_a_second_group_is_of_those_that_were_left(
    says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for a lost host as long as `init_process_group` may take."""
    for name, value in says.items():
        monkeypatch.setenv(name, value)
    first = group_of(2, 3)
    asked = formed(monkeypatch, first, group_of(1, 2), group_of(1, 2))
    timeout = timedelta(minutes=1)
    join.take(*list(next(dist.rendezvous("env://", timeout=timeout)))[1:], timeout)
    ends(first, (1,), parted=True)
    _, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    assert (rank, size) == (1, 2) and asked[1] == (2, 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert (("1" in join._given), ("2" in join._given)) == ("RANK" not in says,) * 2


@pytest.mark.parametrize("said", ["environment", "call", "nothing is agreed on"])
def test_a_second_group_is_the_one_that_the_script_says(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = group_of(2, 3)
    asked = formed(monkeypatch, first, group_of(0, 1))
    timeout = timedelta(minutes=1)
    join.take(*list(next(dist.rendezvous("env://", timeout=timeout)))[1:], timeout)
    ends(first, (1,), parted=said != "nothing is agreed on")
    if said == "environment":
        monkeypatch.setenv("WORLD_SIZE", "4")
    given = (2, 4) if said == "call" else ()
    next(dist.rendezvous("env://", *given, timeout=timeout))
    assert asked[1] == ((3, 2) if said == "nothing is agreed on" else (4, 2))


def test_whether_all_that_were_left_have_left_together() -> None:
    """After a common goodbye all survivors have the same list of lost ranks."""
    groups: list[Group] = []

    def program(group: Group) -> None:
        groups.append(group)
        group.all_reduce(torch.ones(3).numpy()).result()

    found = together(Meeting(3, loses={2: 2}), program)
    assert [type(each) for each in found] == [type(None), GroupClosed, type(None)]
    assert {group.rank: (group.parted, group.lost) for group in groups} == {
        0: (True, (1,)),
        1: (False, ()),
        2: (True, (1,)),
    }
