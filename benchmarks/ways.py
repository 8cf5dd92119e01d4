# SPDX-License-Identifier: Apache-2.0
"""The ways of training that `benchmarks.time_to_accuracy` compares, as they are written on its command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nicps.errors import UsageProblem
from trainer.settings import LANES

FORMS = """\
ddp            DistributedDataParallel on Gloo, float32
fp16           the same with fp16_compress_hook
powersgd-R     the same with powerSGD_hook of rank R, in one bucket
lowrank-R      DistributedDataParallel on nicps with compress(rank=R), in one bucket
local-K        post_localSGD_hook, and PeriodicModelAverager every K steps
changes-K      the same hook on nicps, and nicps.torch.ChangeAverager, in lanes of 8 bits
stripes-LANE   nicps with exchange=stripes and lane=LANE; broadcast-LANE likewise
powersgd-R, local-K and changes-K take their start iteration as in powersgd-1:60; else each of --starts is tried;
lowrank-R has none unless it is given"""

#: A lab has no switch that adds.
EXCHANGES = ("stripes", "broadcast")
DEFAULT = (
    "ddp,fp16,powersgd-1,powersgd-2,powersgd-4,local-4,local-8,local-32,stripes-i16,stripes-i8"
)

_FORM = re.compile(r"([a-z0-9]+)(?:-([a-z0-9]+))?(?::([0-9]+))?")
#: PyTorch's own limits: PowerSGD's first steps rebuild the buckets, and a period of 1 is plain DDP.
_LEAST = {"powersgd": 1, "lowrank": 1, "local": 2, "changes": 2}
_LEAST_START = {"powersgd": 2, "local": 0, "changes": 0}


@dataclass(frozen=True)
class Way:
    """One way of training.

    Attributes:
        kind: "ddp", "fp16", "powersgd", "lowrank", "local", "changes", or an exchange of nicps.
        lane: of an exchange; empty for the rivals.
        number: the rank of PowerSGD and of our factors, the period of local SGD; 0 for all else.
        start: the step with which PowerSGD, our factors or local SGD begin; None where it is not chosen yet.
    """

    kind: str
    lane: str = ""
    number: int = 0
    start: int | None = None

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        what = self.lane or self.number
        start = "" if self.start is None else f":{self.start}"
        return f"{self.kind}-{what}{start}" if what else self.kind

    @property
    def ours(self) -> bool:
        """Whether the job runner of nicps trains."""
        return self.kind in EXCHANGES

    @property
    def needs_agents(self) -> bool:
        """Whether a script of DDP trains over nicps."""
        return self.kind in ("lowrank", "changes")

    def variants(self, starts: tuple[int, ...]) -> list[Way]:
        """The ways among which the best one is chosen: with each of `starts`, or only itself."""
        if self.kind not in _LEAST_START or self.start is not None:
            return [self]
        least = _LEAST_START[self.kind]
        return [replace(self, start=s) for s in dict.fromkeys(max(s, least) for s in starts)]


def parse_way(text: str) -> Way:
    """The way that is written so.

    Raises:
        UsageProblem: there is no such way.
    """
    match = _FORM.fullmatch(text)
    kind, what, start = match.groups(default="") if match else ("", "", "")
    if kind in ("ddp", "fp16") and not what and not start:
        return Way(kind)
    if kind in EXCHANGES and what in LANES and not start:
        return Way(kind, lane=what)
    if kind in _LEAST and what.isdecimal() and int(what) >= _LEAST[kind]:
        least = _LEAST_START.get(kind, 0)
        if start and int(start) < least:
            raise UsageProblem(f"{text!r}: the start iteration of {kind} must be at least {least}")
        return Way(kind, number=int(what), start=int(start) if start else None)
    lanes = ", ".join(f"{exchange}-LANE" for exchange in EXCHANGES)
    raise UsageProblem(
        f"{text!r} is not a way of training: write ddp, fp16, powersgd-R or lowrank-R (R from 1), local-K or changes-K "
        f"(K from 2), or {lanes} with LANE {', '.join(LANES)}"
    )


def parse_ways(text: str) -> tuple[Way, ...]:
    """Several, with commas.

    Raises:
        UsageProblem: there is no such way, or one is named twice.
    """
    ways = tuple(parse_way(part) for part in text.split(","))
    twice = [way.name for at, way in enumerate(ways) if way in ways[:at]]
    if twice:
        raise UsageProblem(f"{twice[0]} is named twice")
    return ways
