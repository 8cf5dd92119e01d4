# SPDX-License-Identifier: Apache-2.0
"""How near-equal the two sets of branches are (docs/servers.md, B1), for `python -m benchmarks.partners --sets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.branches import Item

_SHIPPED = Path(__file__).resolve().parents[1] / "trainer" / "jobs" / "branches"
_WIDER: Mapping[str, Any] = {"width": 64}


@dataclass(frozen=True, slots=True)
class Packed:
    """A network: how many branches and other modules it has, and the parameters of its two sets."""

    network: str
    branches: int
    others: int
    first: int
    second: int

    @property
    def apart(self) -> float:
        """By which part of all parameters the sets differ."""
        return abs(self.first - self.second) / (self.first + self.second)


def measure() -> list[Packed]:
    """The job that ships, in two widths, and networks of the tests."""
    return [_packed(network, items) for network, items in _networks()]


def _networks() -> Iterator[tuple[str, Sequence[Item]]]:
    from tests.branched import GoogLeNet, ResNeXt, Towers
    from trainer.branches import find, items_of, trace
    from trainer.job import load

    yield "branches, width=8", items_of(load(_SHIPPED, {}))
    yield "branches, width=64", items_of(load(_SHIPPED, _WIDER))
    for name, model in (
        ("GoogLeNet", GoogLeNet()),
        ("GoogLeNet, two heads", GoogLeNet(heads=True)),
        ("ResNeXt", ResNeXt()),
        ("two towers", Towers()),
    ):
        yield name, find(model, trace(model))


def _packed(network: str, items: Sequence[Item]) -> Packed:
    from trainer.packing import pack

    branches = sum(item.is_branch for item in items)
    return Packed(network, branches, len(items) - branches, *pack(items).sizes)


def table(rows: Sequence[Packed]) -> str:
    """A table of the rows, for the terminal."""
    lines = [
        f"{'network':<22}{'branches':>10}{'others':>8}{'set 1':>12}{'set 2':>12}{'differ by':>12}"
    ]
    lines += [
        f"{row.network:<22}{row.branches:>10}{row.others:>8}{row.first:>12,}{row.second:>12,}{row.apart:>12.2%}"
        for row in rows
    ]
    return "\n".join(lines)
