# SPDX-License-Identifier: Apache-2.0
"""A session that keeps its offers and sums outside of its working folder, which goes with a host that dies.

FOLDER/ROUND.offer.npz: number, life, samples, vector. FOLDER/ROUND.sum.npz: number, life, counted, n, unit, members,
exchange, view, aggregators, total, digest. A `life` ends where the rounding error of what was counted is forgotten:
with the process, or when it takes another member's state.

As long as there is FOLDER/hold it waits before it offers, and says so with FOLDER/ROUND.waits; where FOLDER/half is
there too it offers, lets half of the gradient go out, and says FOLDER/ROUND.half. The rest follows when half has gone.
In stripes the own one is in the first half.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nicps.client import F32, Commit, Session
from nicps.session import lanes, sized
from nicps.session.lanes import LaneFormat


class Recording(Session):
    """A session that writes everything down before it happens."""

    folder = Path()
    life = ""
    _summed: F32 | None = None

    def contribute(self, round_: int, vector: F32, samples: int, *, finite: bool = True) -> None:
        self._save(f"{round_}.offer.npz", samples=samples, vector=vector)
        hold, half = self.folder / "hold", self.folder / "half"
        if hold.exists():
            (self.folder / f"{round_}.waits").touch()
        _wait(lambda: half.exists() or not hold.exists())
        if not half.exists():
            super().contribute(round_, vector, samples, finite=finite)
            return
        arena = self._shared().arena
        doorbell = self._shared().adding.offers._handover._doorbell
        tell, total = arena.set_converted, LaneFormat(self._format.lanes, self._width()).fragments

        def tell_half(of: int, fragments: int) -> None:
            if 2 * fragments >= total and not (self.folder / f"{of}.half").exists():
                tell(of, total // 2)
                os.eventfd_write(doorbell, 1)
                _wait(lambda: self.sending_since(of) or not half.exists())
                (self.folder / f"{of}.half").touch()
                _wait(lambda: not half.exists())
            tell(of, fragments)

        arena.set_converted = tell_half  # type: ignore[method-assign]
        # As a long vector: it is offered before it is converted.
        batch, short = lanes.BATCH_VALUES, sized._SHORT
        lanes.BATCH_VALUES, sized._SHORT = batch // 32, 0
        try:
            super().contribute(round_, vector, samples, finite=finite)
        finally:
            lanes.BATCH_VALUES, sized._SHORT = batch, short
            arena.set_converted = tell  # type: ignore[method-assign]

    def sum(self, commit: Commit, out: F32 | None = None) -> F32:
        total = super().sum(commit, out)
        self._summed = total.copy()
        return total

    def applied(self, commit: Commit, digest: str = "") -> None:
        total, self._summed = self._summed, None
        if total is not None:  # in a test round there is none
            self._save(
                f"{commit.round}.sum.npz",
                counted=np.array(sorted(commit.counted.items()), np.int64).reshape(-1, 2),
                n=commit.samples,
                unit=commit.unit,
                members=commit.members,
                exchange=commit.exchange.name,
                view=commit.view,
                aggregators=np.array(commit.aggregators, np.int64),
                total=total,
                digest=digest,
            )
        super().applied(commit, digest)

    def loaded(self, number: int, digest: str) -> None:
        self._begin_life()
        super().loaded(number, digest)

    def _width(self) -> int:
        return int(str(self.settings.get("lane", "i16"))[1:])

    def _begin_life(self) -> None:
        self.life = f"{os.getpid()}-{time.monotonic_ns()}"

    def _save(self, name: str, **values: Any) -> None:
        if not self.life:
            self._begin_life()
        part = self.folder / f".{name}"
        with part.open("wb") as file:
            np.savez(file, number=self.number, life=self.life, **values)
        os.replace(part, self.folder / name)


def _wait(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)
