# SPDX-License-Identifier: Apache-2.0
"""Calls of a group, drawn from a seed, with what must come of them; and links between threads in place of agents."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.collective import Group, GroupClosed
from nicps.collective.lanes import fragments_of
from nicps.session.lanes import LaneFormat
from nicps.session.shared_form import ChannelPlan
from nicps.session.sized import Outcome, Rest, Round, Vector
from nicps.session.stripes import stripe
from nicps.wire import MAX_SHIFT, NOT_FINITE, sized_samples

Array = npt.NDArray[Any]

TYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)


def _product(left: Array, right: Array) -> Array:
    """Of complex numbers each operation is rounded by itself, where NumPy may fuse some."""
    if left.dtype.kind != "c":
        return np.asarray(left * right)
    (a, b), (c, d) = (each.view(each.real.dtype).reshape(-1, 2).T for each in (left, right))
    return np.stack([a * c - b * d, a * d + b * c], axis=1).reshape(-1).view(left.dtype)


#: Of each member, with up to eight: a call of as many bytes is gathered (docs/direct.md).
_GATHERED_BYTES = 5760

_FOLDS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "product": _product,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


# ---- what is called, and what must come of it


@dataclass(frozen=True)
class Drawn:
    """One call: the same at all ranks but for the vectors, which follow from seed and rank."""

    what: str
    type: str
    length: int
    operation: str
    root: int
    size: int
    seed: tuple[int, ...]
    marred: bool = False

    def vector(self, rank: int) -> Array:
        """That rank's; uint16 for bfloat16."""
        random = np.random.default_rng([*self.seed, rank])
        if self.type == "bool":
            return random.random(self.length) < 0.5
        if self.type[0] in "iu":
            limits = np.iinfo(self.type)
            return random.integers(limits.min, limits.max, self.length, self.type, endpoint=True)
        scale = 2.0 ** random.integers(-8, 8, self.length)
        found = random.standard_normal(self.length) * scale
        if self.marred and self.length and rank == 1 % self.size:
            found[random.integers(0, self.length, 3)] = random.choice([np.nan, np.inf, -np.inf], 3)
        if self.type == "bfloat16":
            return to_bfloat16(found.astype(np.float32))
        if self.type == "complex64":
            return (found + 1j * random.standard_normal(self.length)).astype(np.complex64)
        return found.astype(self.type)

    def call(self, group: Group, channel: int = 0) -> Future[Any]:
        """Make it."""
        vector, dtype = self.vector(group.rank), self.type
        named: dict[str, Any] = {"channel": channel}
        if dtype == "bfloat16":
            named["dtype"] = dtype
        match self.what:
            case "all_reduce":
                return group.all_reduce(vector, self.operation, **named)
            case "reduce":
                return group.reduce(vector, self.root, self.operation, **named)
            case "reduce_scatter":
                return group.reduce_scatter(vector, self.operation, **named)
            case "broadcast":
                return group.broadcast(vector, self.root, **named)
            case "all_gather":
                return group.all_gather(vector, **named)
            case _:
                return group.barrier(channel=channel)

    def needs(self) -> set[int]:
        """The ranks without which there is no result."""
        if self.what == "broadcast":
            return {self.root}
        return set(range(self.size)) if self.what == "all_gather" else set()

    def check(self, result: Array | None, rank: int, counted: list[int]) -> None:
        """It must be what NumPy makes of the vectors of these ranks."""
        if self.what == "barrier" or (self.what == "reduce" and rank != self.root):
            assert result is None
            return
        assert result is not None
        if self.what == "broadcast":
            same_bits(result, self.vector(self.root))
            return
        if self.what == "all_gather":
            same_bits(result, np.stack([self.vector(k) for k in range(self.size)]))
            return
        expected, error = self._reduced(counted)
        if self.what == "reduce_scatter":
            part = self.length // self.size
            here = slice(rank * part, (rank + 1) * part)
            expected, error = expected[here], error[here] if error is not None else None
        if error is None:
            same_bits(result, expected)
            return
        assert result.dtype == expected.dtype
        found, wanted = self._wide(result), self._wide(expected)
        finite = np.isfinite(wanted)
        assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True), self
        off = np.abs(found[finite] - wanted[finite])
        assert (off <= error[finite]).all(), self

    def _wide(self, values: Array) -> Array:
        if self.type == "bfloat16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.complex128 if self.type == "complex64" else np.float64)

    def _reduced(self, counted: list[int]) -> tuple[Array, Array | None]:
        """The result, and by how much it may be off; None: by nothing."""
        rows = [self.vector(k) for k in counted]
        name, kind = self.operation, np.dtype("uint16" if self.type == "bfloat16" else self.type)
        sums = name in ("sum", "avg")
        with np.errstate(all="ignore"):
            if self.type == "bool" and name in ("sum", "product"):
                fold = np.logical_or if name == "sum" else np.logical_and
                return fold.reduce(rows), None
            if kind.kind in "iub" and self.type != "bfloat16":
                total = rows[0]
                for row in rows[1:]:
                    total = _FOLDS[name](total, row)
                return total, None
            lanes = self.length * (2 if self.type == "complex64" else 1)
            # Up to four frames of each are gathered, and added in rank order.
            if sums and self.type != "float64" and lanes > 360 and rows[0].nbytes > _GATHERED_BYTES:
                return self._rounded(rows)
            halves = self.type in ("float16", "bfloat16")
            wide = [self._wide(row).astype(np.float32) if halves else row for row in rows]
            total = wide[0]
            for row in wide[1:]:
                total = _FOLDS[name](total, row)
            if name == "avg":
                real = total.view(np.float32 if self.type == "complex64" else total.dtype)
                total = (real / real.dtype.type(len(rows))).view(total.dtype)
            if self.type == "bfloat16":
                return to_bfloat16(total), None
            return total.astype(kind), None

    def _rounded(self, rows: list[Array]) -> tuple[Array, Array]:
        """A lane's step is 2**-31 of its fragment's largest number; what is not finite is as IEEE 754 has it.

        A fragment with such numbers is gathered: every addition of float32 is off by 2**-24 of what it comes to.
        """
        wide = [self._wide(row) for row in rows]
        total = np.sum(wide, axis=0)
        magnitude = np.max([np.abs(row) for row in wide], axis=0)
        per = 360 // (2 if self.type == "complex64" else 1)
        padded = np.pad(np.nan_to_num(magnitude, nan=0, posinf=0), (0, -len(total) % per))
        largest = np.repeat(padded.reshape(-1, per).max(axis=1), per)[: len(total)]
        lost = np.pad(~np.isfinite(total), (0, -len(total) % per)).reshape(-1, per).any(axis=1)
        addends = np.sum(np.abs(wide), axis=0, where=np.isfinite(wide))
        gathered = np.where(np.repeat(lost, per)[: len(total)], addends * 2.0**-24 * len(rows), 0)
        steps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(self.type, 2.0**-22)
        error = largest * 2.0**-31 * (2 + 2 * len(rows)) + np.abs(total) * steps
        error += gathered
        error = np.maximum(error, 2.0**-24 if self.type == "float16" else 0)
        if self.operation == "avg":
            total = total / len(rows)
        if self.type == "bfloat16":
            return to_bfloat16(total.astype(np.float32)), error
        return total.astype(self.type), error


def to_bfloat16(values: Array) -> Array:
    """float32 as uint16, rounded to the nearest, halves to even."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()


def same_bits(found: Array, expected: Array) -> None:
    """Bit for bit, but for the payload of NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype.kind in "fc":
        assert np.array_equal(found, expected, equal_nan=True)
        signs = np.signbit(found.real) == np.signbit(expected.real)
        assert (signs | np.isnan(expected)).all()
    else:
        assert np.array_equal(found, expected)


def draw(seed: int, number: int, size: int, most: int = 4000) -> Drawn:
    """The call of that number."""
    random = np.random.default_rng([seed, number])
    whats = (
        "all_reduce",
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "broadcast",
        "all_gather",
        "barrier",
    )
    what, type_ = str(random.choice(whats)), str(random.choice(TYPES))
    operations = ["sum", "sum", "product", "min", "max"]
    if type_[0] in "iu" or type_ == "bool":
        operations += ["band", "bor", "bxor"]
    else:
        operations += ["avg"]
    if type_ == "complex64":
        operations = ["sum", "avg", "product"]
    kinds = [0, 1, int(random.integers(2, 400)), int(random.integers(400, most))]
    length = int(random.choice(kinds))
    if what == "reduce_scatter":
        length = length // size * size
    return Drawn(
        what,
        type_,
        length,
        str(random.choice(operations)),
        int(random.integers(size)),
        size,
        (seed, number),
        marred=bool(random.random() < 0.2)
        and type_ in ("float16", "bfloat16", "float32", "float64"),
    )


# ---- links between threads


@dataclass
class Meeting:
    """Where the threads of all members meet: rounds with the arithmetic of the kernel.

    `loses`: members that leave before they come to a round of that number. Those of a number beyond `size` come late,
    and `expects` so many of them before a round after which they may come in.
    """

    size: int
    room: int = 8000
    loses: dict[int, int] = field(default_factory=dict)
    rounds: int = 0
    expects: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._live = set(range(1, self.size + 1))
        self._offers: dict[int, tuple[int, Vector]] = {}
        self._made: dict[int, Made] = {}
        self._listed: dict[int, dict[int, int]] = {}
        self._waiting: set[int] = set()
        self._admits = False

    def leave(self, number: int) -> None:
        """That member is lost."""
        with self._lock:
            self._live.discard(number)
            self._try()

    def come_in(self, number: int) -> int:
        """Wait until that late member is taken in: the last round before it."""
        with self._lock:
            self._waiting.add(number)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: number in self._live, timeout=20)
            return self.rounds

    def exchange(
        self, number: int, round_: int, samples: int, vector: Vector, *, admits: bool = False
    ) -> dict[int, int]:
        """What all have offered to the round; the sums are with the vector, if that is the same."""
        with self._lock:
            self._admits |= admits
            if admits:
                self._lock.wait_for(lambda: len(self._waiting) >= self.expects, timeout=20)
            if self.loses.get(number) == round_:
                self._live.discard(number)
                self._try()
                raise GroupClosed("it is lost")
            self._offers[number] = samples, vector
            self._try()
            self._lock.wait_for(lambda: round_ in self._listed, timeout=20)
            listed = self._listed[round_]
        if len(set(listed.values())) == 1:
            vector.settle(self._made[round_].outcome(list(listed).index(number)))
        return listed

    def _try(self) -> None:
        if not self._live or not self._offers.keys() >= self._live:
            return
        offers = {k: self._offers[k] for k in sorted(self._live)}
        self._offers = {}
        self.rounds += 1
        listed = {k: samples for k, (samples, _) in offers.items()}
        if len(set(listed.values())) == 1:
            self._made[self.rounds] = make([vector for _, vector in offers.values()])
        self._listed[self.rounds] = listed
        if self._admits:
            agrees, self._admits = len(set(listed.values())) == 1, False
            came = self._waiting if agrees else set()
            self._live |= came
            self._waiting = self._waiting - came
        self._lock.notify_all()


@dataclass
class Made:
    """A round's sums; what each member has contributed, in order of rank; what rounding has left over, in units."""

    lanes: Array
    exponents: Array
    written: list[tuple[Array, Array]]
    rest: Array
    unit: int

    def outcome(self, rank: int) -> Outcome:
        """As the member of that rank among those listed sees it."""
        count, members = len(self.exponents), len(self.written)
        here, rest = stripe(count, rank, members), None
        part = slice(here.start, here.stop)
        if members > 1:
            rest = Rest(here.start, self.rest[part], self.exponents[part] != NOT_FINITE)
        own = self.written[rank]
        return Outcome(count, self.lanes, self.exponents, *own, members, self.unit, rest)


def make(vectors: list[Vector]) -> Made:
    """A round, as the XDP programs make it (docs/stripes.md, "Numbers")."""
    width = vectors[0].width
    format = LaneFormat(vectors[0].numbers, width)
    count = fragments_of(vectors[0].numbers, width)
    shape, most = (count, format.per_fragment), MAX_SHIFT[width]
    written = []
    for vector in vectors:
        lanes, exponents = np.zeros(shape, format.wire), np.zeros(count, np.int8)
        for first in range(0, count, format.batch):
            vector.write(first, min(format.batch, count - first), lanes, exponents)
        written.append((lanes, exponents))
    unit = max(-120, max(vector.bound() for vector in vectors) - most)
    total, lost = np.zeros(shape, np.int64), np.zeros(count, np.bool_)
    if len(written) == 1:
        return Made(*written[0], written, total, unit)
    for lanes, narrow in written:
        exponents = narrow.astype(np.int64)
        lost |= exponents == NOT_FINITE
        by = np.where(exponents == NOT_FINITE, 0, exponents - unit)[:, None]
        assert (by <= most).all()
        wide = lanes.astype(np.int64)
        total += np.where(by >= 0, wide << np.maximum(by, 0), wide >> np.clip(-by, 0, 63))
    magnitude = np.bitwise_or.reduce(total ^ (total >> 63), axis=1)
    bits = np.array([int(each).bit_length() for each in magnitude])
    shift = np.maximum(bits - (width - 1), 0)[:, None]
    half = np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0)
    lanes = np.minimum((total + half) >> shift, 2 ** (width - 1) - 1)
    exponents = unit + shift[:, 0]
    lost |= exponents > 128 - width
    exponents[lost] = NOT_FINITE
    rest = np.where(lost[:, None], 0, total - (lanes << shift))
    return Made(lanes.astype(format.wire), exponents.astype(np.int8), written, rest, unit)


class ThreadLink:
    """A link of one of a meeting's members."""

    def __init__(self, meeting: Meeting, number: int, first: int = 0) -> None:
        self.number, self.room = number, meeting.room
        self.names = {k: f"h{k}" for k in {*range(1, meeting.size + 1), number}}
        self._meeting, self._round = meeting, first
        self.closed = ""
        self.admits = False
        self.plan = self.agreed = (ChannelPlan(0, (meeting.room,)),)

    @classmethod
    def late(cls, meeting: Meeting, number: int) -> ThreadLink:
        """Of a member that comes in late, or back."""
        return cls(meeting, number, meeting.come_in(number))

    def of(self, channel: int) -> ThreadLink:
        """Its only channel."""
        assert not channel
        return self

    @property
    def is_over(self) -> bool:
        """It is closed."""
        return bool(self.closed)

    def exchange(self, vector: Vector, call: int, deadline: float) -> Round:
        """A round."""
        self._round += 1
        samples = sized_samples(fragments_of(vector.numbers, vector.width), call, vector.width)
        admits, self.admits = self.admits, False
        try:
            found = self._meeting.exchange(self.number, self._round, samples, vector, admits=admits)
        except GroupClosed as error:
            self.closed = str(error)
            raise
        return Round(self._round, found)

    def gather(self, *_: object) -> None:
        """All calls take rounds."""

    def leave(self) -> None:
        """After the last call."""
        self.closed = "left"

    def close(self, reason: str) -> None:
        """The others go on."""
        self.closed = reason
        self._meeting.leave(self.number)

    abandon = close

    def disown(self, reason: str) -> None:
        """In a process that was forked."""
        self.closed = reason


def together(meeting: Meeting, program: Callable[[Group], Any], **options: Any) -> list[Any]:
    """Run a program as every member of a group, in threads; what each returns or raises, by number.

    `late`: so many more come late.
    """
    last = meeting.size + options.get("late", 0)
    results: list[Any] = [None] * last
    ranks = options.get("ranks")

    def run(number: int) -> None:
        try:
            rank = ranks[number - 1] if ranks else None
            come_in: Any = partial(ThreadLink.late, meeting, number)
            link: Any = ThreadLink(meeting, number) if number <= meeting.size else None
            group = Group(link, rank, 30.0, come_in, meeting.size)
            results[number - 1] = program(group)
            group.close()
        except BaseException as error:
            results[number - 1] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(1, last + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a member hangs"
    return results
