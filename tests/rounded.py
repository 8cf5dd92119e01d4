# SPDX-License-Identifier: Apache-2.0
"""The rule of summing `rounded`, as cases for whatever adds by it: stripes and a Linux switch, model and XDP program.

What is expected comes from Python's own integers (tests/striped_reference.py). `Rest` cases are a Linux switch's: what
rounding has left over of one sum is added to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nicps import wire
from nicps.wire import FrameType
from tests.linux_switch import SwitchModel
from tests.model import Outcome
from tests.striped_reference import Piece, add, carry
from tests.stripes import (
    I64,
    LANES,
    MACS,
    NATIVE,
    NETWORK,
    shifted,
    signed,
)
from tests.stripes_model import Own, StripesModel

VIEW, ROUND = 3, 4
WIDTHS = (8, 16, 32)
NOT_FINITE = wire.NOT_FINITE


@dataclass(frozen=True)
class Case:
    """A sum: its unit, and of each member on the list, from number 1 on, exponent and lanes."""

    name: str
    width: int
    unit: int
    parts: tuple[tuple[int, I64], ...]

    def __str__(self) -> str:
        return f"{self.name}-i{self.width}"

    @property
    def members(self) -> int:
        return (1 << len(self.parts)) - 1

    def pieces(self) -> list[Piece]:
        return [Piece(exponent, lanes.tolist()) for exponent, lanes in self.parts]

    def expected(self, carried: list[int] | None = None) -> Piece:
        """The sum; what it leaves over is in units."""
        made = add(self.pieces(), self.width, self.unit, carried)
        return made if made.rest else Piece(made.exponent, made.lanes, [0] * len(made.lanes))

    def frame(self, number: int, round_: int, to: bytes, view: int = 0, behind: int = 0) -> bytes:
        """A member's contribution."""
        exponent, lanes = self.parts[number - 1]
        header = wire.Header(network=NETWORK, view=VIEW, round=round_, sender=number)
        body = wire.Contribution(
            self.members, 0, 1, view, self.width, exponent, self.unit, behind=behind
        )
        payload = lanes.astype(NATIVE[self.width]).tobytes()
        return signed(number, FrameType.CONTRIBUTION, header, body, payload, to, b"")


@dataclass(frozen=True)
class Rest:
    """A sum, and the sum before, whose remainder is added; or there is no room for that."""

    name: str
    former: Case
    case: Case

    def __str__(self) -> str:
        return f"{self.name}-i{self.case.width}"

    def carried(self) -> list[int] | None:
        """What is added; None: there is no room."""
        listed = len(self.case.parts)
        return carry(self.former.expected(), self.former.unit, self.case.unit, listed)


@dataclass
class _Cases:
    width: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    @property
    def least(self) -> int:
        return -(1 << self.width - 1)

    @property
    def most(self) -> int:
        return (1 << self.width - 1) - 1

    @property
    def top(self) -> int:
        return wire.MAX_SHIFT[self.width]

    def full(self, value: int) -> I64:
        return np.full(LANES[self.width], value, np.int64)

    def any(self) -> I64:
        lanes = self.rng.integers(self.least, self.most, LANES[self.width], endpoint=True)
        lanes[:6] = self.least, self.most, -1, 0, 1, self.least
        return lanes

    def case(self, name: str, unit: int, *parts: tuple[int, I64]) -> Case:
        return Case(name, self.width, unit, parts)

    def all(self) -> Iterator[Case]:
        case, any_, full = self.case, self.any, self.full
        low, high, top = self.least, self.most, self.top
        yield case("two", -30, (-27, any_()), (-29, any_()))
        yield case("zeros", -30, (-30, full(0)), (-30, full(0)))
        yield case("minus one", -30, (-30, full(-1)), (-30, full(0)))
        for count in (2, 33, 63, 64):
            at = -30 + top
            yield case(f"{count} least", -30, *[(at, full(low))] * count)
            yield case(f"{count} largest", -30, *[(at, full(high))] * count)
            yield case(f"{count} at the top", -30, *[(at, any_()) for _ in range(count)])
        below = (-1, -2, -self.width, -40, -63, -64, -65, -90)
        yield case("below the unit", -30, *[(-30 + by, any_()) for by in below])
        yield case("all below the unit", -30, (-94, any_()), (-30 - 64, full(-1)))
        yield case("half to even and odd", -30, (-30, full(high)), (-30, any_() & 3))
        yield case("half below zero", -30, (-30, full(low)), (-30, -(any_() & 3)))
        yield case(
            "rounds up to too many", -30, (-30, full(high)), (-30, full(high)), (-30, full(1))
        )
        yield case("not finite", -30, (-28, any_()), (NOT_FINITE, any_()), (-30, any_()))
        yield case("none is finite", 77, (NOT_FINITE, any_()), (NOT_FINITE, full(low)))
        end = 128 - self.width
        yield case("the largest exponent", end - top, (end, full(low)), (end, full(-low - 1)))
        yield case("the largest sums", end - top, (end - 1, full(high)), (end - 1, full(high)))
        yield case("the least sums", end - top, (end - 1, full(low)), (end - 1, full(low)))
        yield case("exponents end", end - top, (end, full(high)), (end, full(high)))
        yield case("exponents end below", end - top, (end, full(low)), (end, full(-1)))
        yield case("the least unit", -120, (-120, any_()), (-120 + top, any_()), (-119, any_()))

    def rests(self) -> Iterator[Rest]:
        before = self.case("former", -20, (-20 + self.top, self.any()), (-21, self.any()))
        ends = before.expected().exponent
        rich = self.case("former", -20, *[(-20 + self.top, self.any()) for _ in range(7)])
        for by in (0, 1, 7, 33, 63, 64, 65, 97):
            yield Rest(f"down {by}", before, self._sum(-20 + by, 3))
        for by in (1, 5):
            yield Rest(f"up {by}", rich, self._sum(-20 - by, 3))
        for listed, room in ((2, 61), (32, 61), (33, 57), (63, 57)):
            for over in (0, 1):
                unit = ends - room - over
                name = f"{listed} members, {'too much' if over else 'as much as goes'}"
                yield Rest(name, before, self._sum(unit, listed, self.full(self.least)))
                yield Rest(
                    f"{name}, largest", before, self._sum(unit, listed, self.full(self.most))
                )
        yield Rest("64 members", before, self._sum(-20, 64))
        nan = self.case("former", -20, (NOT_FINITE, self.any()), (-20, self.any()))
        yield Rest("of a sum that is not finite", nan, self._sum(-20, 3))
        yield Rest("into a sum that is not finite", before, self.case("sum", -20, *nan.parts))
        high = self.case("former", 126 - self.top, *[(126, self.full(self.most))] * 3)
        yield Rest("where exponents ended", high, self._sum(60 - self.top, 3))

    def _sum(self, unit: int, listed: int, lanes: I64 | None = None) -> Case:
        at = min(unit + self.top, 126)
        parts = [(at, self.any() if lanes is None else lanes) for _ in range(listed)]
        return self.case("sum", unit, *parts)


CASES = [case for width in WIDTHS for case in _Cases(width).all()]
RESTS = [rest for width in WIDTHS for rest in _Cases(width).rests()]


def stripes_model(case: Case) -> StripesModel:
    """Member 1 aggregates the only fragment, and its own part is the first."""
    live, ranks = frozenset(range(1, len(case.parts) + 1)), {1: 1}
    exponent, lanes = case.parts[0]
    width = (case.width, case.width)
    model = StripesModel(
        1, live, (ranks, ranks), width, 1, 1, VIEW, (ROUND, ROUND + 1), offered=[1, 1]
    )
    model.own = {(ROUND & 1, 0): Own(1, exponent, lanes.astype(NATIVE[case.width]).tobytes())}
    return model


def stripes_frames(case: Case) -> list[bytes]:
    """What the others send it."""
    return [case.frame(number, ROUND, MACS[0]) for number in range(2, len(case.parts) + 1)]


def switch_model(case: Case) -> SwitchModel:
    """With room for one fragment."""
    return SwitchModel(frozenset(range(1, wire.MAX_MEMBERS + 1)), 1, case.width, VIEW)


def switch_frames(case: Case) -> list[bytes]:
    """What all send it."""
    numbers = range(1, len(case.parts) + 1)
    return [case.frame(number, ROUND, wire.SWITCH) for number in numbers]


def rest_frames(rest: Rest) -> list[bytes]:
    """The same with the round before, two rounds before."""
    numbers = range(1, len(rest.former.parts) + 1)
    former = [rest.former.frame(number, ROUND - 2, wire.SWITCH) for number in numbers]
    numbers = range(1, len(rest.case.parts) + 1)
    return former + [rest.case.frame(n, ROUND, wire.SWITCH, VIEW, 2) for n in numbers]


def agrees(
    case: Case, outcomes: list[Outcome], left: I64, carried: list[int] | None = None
) -> None:
    """The last of these frames has become the sum, and the accumulators hold what rounding has left over."""
    *others, last = outcomes
    assert {one.counters[0] for one in others} <= {"gathered", "summed"}
    assert last.out is not None and last.counters[0] == "summed"
    sum_ = wire.unpack(last.out[wire.ETHERNET_BYTES :])
    expected = case.expected(carried)
    assert isinstance(sum_.body, wire.Sum) and sum_.type == FrameType.SUM
    assert sum_.body.exponent == expected.exponent
    assert left.tolist() == expected.rest
    if expected.exponent == NOT_FINITE:
        return  # its lanes have no meaning
    lanes = np.frombuffer(sum_.tail, NATIVE[case.width]).astype(np.int64)
    assert lanes.tolist() == expected.lanes
    shift = expected.exponent - case.unit
    exact = [*carried] if carried else [0] * len(lanes)
    for exponent, part in case.parts:
        by = shifted(part, exponent - case.unit).tolist()
        exact = [one + other for one, other in zip(exact, by, strict=True)]
    assert exact == [
        lane * 2**shift + rest for lane, rest in zip(expected.lanes, left.tolist(), strict=True)
    ]


def check_rest(rest: Rest, run: Callable[[bytes], Outcome], left: Callable[[], I64]) -> None:
    """A switch adds the remainder, or counts that it is left out."""
    outcomes = [run(frame) for frame in rest_frames(rest)]
    carried = rest.carried()
    agrees(rest.case, outcomes, left(), carried)
    counted = sum("left_out" in one.counters for one in outcomes)
    assert counted == (carried is None)
