# SPDX-License-Identifier: Apache-2.0
"""Need first: which parameters travel in which round, on which channel (P2; docs/channels.md, "Need first").

    timing = Timing(nbytes, released, needed, backward, forward)     # measured, in the order of need
    line = Line.fitted(rounds, update)                               # measured
    plan = plan_for(timing, line, channels=4, hosts=4)
    plan.ends, plan.channels, plan.seconds

Arithmetic only: no clock, no network, and nothing of nicps. Whoever measures is the trainer, and a script's hooks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import NamedTuple

MOST_ROUNDS = 32  # of a step, over all channels (`nicps.wire.MOST_ROUNDS`)
CONTROL_FRAMES = 12_000  # a second, of all members together: the kernel's limit
_CONTROL_SHARE = 1 / 4  # of a member's, that rounds may take; each round takes two
_GROWTHS = 1, 2, 4, 8, 16, 32  # how much larger the last part is than the first
_SIMPLER = 1.01  # fewer rounds are preferred within this
_PAYS = 1.03  # by so much several channels must be better than one


@dataclass(frozen=True, slots=True)
class Timing:
    """One step of a model, computing only. All sequences have an entry for each parameter, in the order of need.

    Attributes:
        nbytes: bytes of its gradient on the line.
        released: seconds from the beginning of backward until all members have its gradient.
        needed: seconds from the beginning of forward until its first use.
        backward, forward: seconds of each.
    """

    nbytes: tuple[int, ...]
    released: tuple[float, ...]
    needed: tuple[float, ...]
    backward: float
    forward: float

    def __post_init__(self) -> None:
        if not len(self.nbytes) == len(self.released) == len(self.needed) > 0:
            raise ValueError("a timing has bytes, release and need of each parameter")


@dataclass(frozen=True, slots=True)
class Line:
    """The cost of rounds on the line.

    Attributes:
        latency: seconds of a round beside its bytes: offer, mark, reading.
        pace: seconds a byte.
        update: seconds a byte to read a sum and update its parameters.
        occupied: seconds of a round, of its latency, in which no other round gets on: those of the processors.
    """

    latency: float
    pace: float
    update: float = 0.0
    occupied: float = 0.0

    @classmethod
    def fitted(cls, rounds: Sequence[tuple[int, float]], update: float = 0.0) -> Line:
        """Least squares over (bytes, seconds) of rounds that had the line alone; neither part is below 0.

        Raises:
            ValueError: there is no round.
        """
        if not rounds:
            raise ValueError("no round was measured")
        n = len(rounds)
        mean_b, mean_s = sum(b for b, _ in rounds) / n, sum(s for _, s in rounds) / n
        spread = sum((b - mean_b) ** 2 for b, _ in rounds)
        common = sum((b - mean_b) * (s - mean_s) for b, s in rounds)
        pace = max(0.0, common / spread) if spread else mean_s / mean_b
        latency = mean_s - pace * mean_b
        if latency < 0.0:  # the line through 0
            latency, pace = 0.0, sum(b * s for b, s in rounds) / sum(b * b for b, _ in rounds)
        return cls(latency, pace, update)

    def taken(self, nbytes: int) -> float:
        """Seconds for which a round of so many bytes keeps the others from getting on."""
        return nbytes * self.pace + self.occupied


class Bounds(NamedTuple):
    """Seconds of a step without latency: all one after the other; with backward overlap; with a priority for each
    parameter, which no plan can be better than.
    """

    one_after_the_other: float
    backward_overlap: float
    at_best: float


def bounds(timing: Timing, pace: float) -> Bounds:
    """Bounds of that model's step on a line of that pace (docs/channels.md has the formulas)."""
    ahead, overlap, late = 0.0, timing.backward, 0.0
    for nbytes, released, needed in zip(timing.nbytes, timing.released, timing.needed, strict=True):
        ahead += nbytes * pace  # of all that is needed as early
        overlap = max(overlap, released + ahead)
        late = max(late, released + ahead - timing.backward - needed)
    computing = timing.backward + timing.forward
    return Bounds(computing + ahead, overlap + timing.forward, computing + late)


@dataclass(frozen=True, slots=True)
class Part:
    """What one round brings: bytes `first` to `last` of the vector, in the order of need.

    Attributes: `released`, of its last gradient; `needed`, of its first use.
    """

    first: int
    last: int
    released: float
    needed: float

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.last - self.first


def cut(
    timing: Timing, count: int, grain: int = 1, growth: float = 1.0, *, whole: bool = False
) -> list[Part]:
    """At most `count` parts in the order of need, each larger by the same factor than the one before it.

    A part ends where a parameter does, if that is within a quarter of a part of its share; a larger parameter is cut at
    a multiple of `grain` bytes.

    Args:
        growth: the last part's bytes to the first one's; 1: all are about equal.
        whole: every part but the last one is a multiple of `grain`. Then it has the first bytes of the next parameter,
            too, whose gradient is there earlier: so no part is released later.
    """
    places = [0, *accumulate(timing.nbytes)]
    total, ends = places[-1], [0]
    sizes = [growth ** (at / max(1, count - 1)) for at in range(count)]
    scale = total / sum(sizes)
    for wanted, size in zip(accumulate(sizes[:-1]), sizes, strict=False):
        wanted, size = wanted * scale, size * scale
        near = _nearest(places, wanted)
        inside = round(wanted / grain) * grain
        end = near if abs(near - wanted) <= size / 4 else inside
        if whole:
            end = -(-end // grain) * grain
        if ends[-1] < end < total:
            ends.append(end)
    ends.append(total)
    return parts_at(timing, ends[1:])


def _nearest(places: Sequence[int], wanted: float) -> int:
    """Of places that rise, the first of those that are nearest."""
    at = bisect_left(places, wanted)
    return min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - wanted))


def nearest_ends(ends: Sequence[int], nbytes: Sequence[int]) -> list[int]:
    """The ends of parameters that are nearest to these, each once; the last one is the end of all."""
    places = list(accumulate(nbytes))
    found = {_nearest(places, end) for end in ends[:-1]} - {0}
    return sorted({*found, places[-1]})


def parts_at(timing: Timing, ends: Sequence[int]) -> list[Part]:
    """The parts that end there, in the order of need."""
    places = [0, *accumulate(timing.nbytes)]
    return [_part(timing, places, first, last) for first, last in pairwise((0, *ends))]


def _part(timing: Timing, places: Sequence[int], first: int, last: int) -> Part:
    # Parameters of no bytes are in no part.
    inside = slice(bisect_right(places, first) - 1, bisect_left(places, last))
    return Part(first, last, max(timing.released[inside]), min(timing.needed[inside]))


def step_seconds(
    timing: Timing, line: Line, parts: Sequence[Part], channels: Sequence[int]
) -> float:
    """From the beginning of one backward pass to that of the next, if each part is on that channel.

    One line; at any time it has the open round of the highest channel. A channel's rounds come in the order in which
    they are released, and the next one is open once the one before is committed. Forward waits for each part.
    """
    arrives = _arrivals(line, parts, channels)
    clock, before = timing.backward, 0.0
    for part, arrival in zip(parts, arrives, strict=True):
        clock, before = clock + max(0.0, part.needed - before), max(before, part.needed)
        clock = max(clock, arrival) + part.nbytes * line.update
    return clock + timing.forward - before


def calibrated(
    timing: Timing, line: Line, parts: Sequence[Part], channels: Sequence[int], seconds: float
) -> Line:
    """The line on which a step of these parts takes so many seconds, as it was seen to; the same one, if it takes less.

    What a step takes beyond its prediction is put down to its rounds: each one occupies the processors, of the members
    or of a machine that they share, for as long as no other gets on.
    """
    least, most = 0.0, seconds / len(parts)
    if step_seconds(timing, line, parts, channels) >= seconds:
        return line
    for _ in range(30):
        middle = (least + most) / 2
        if step_seconds(timing, replace(line, occupied=middle), parts, channels) < seconds:
            least = middle
        else:
            most = middle
    return replace(line, occupied=most)


def overlapped_seconds(timing: Timing, line: Line, parts: Sequence[Part]) -> float:
    """Seconds of a step with backward overlap only: one channel, and forward begins once all parameters are updated."""
    last = max(_arrivals(line, parts, (0,) * len(parts)))
    updates = parts[-1].last * line.update
    return max(timing.backward, last) + updates + timing.forward


def _arrivals(line: Line, parts: Sequence[Part], channels: Sequence[int]) -> list[float]:
    """When each part's sum is there."""
    queues: dict[int, list[int]] = {}
    for index in sorted(range(len(parts)), key=lambda k: (parts[k].released, -k), reverse=True):
        queues.setdefault(channels[index], []).append(index)  # the next one is the last
    arrives, beside = [0.0] * len(parts), max(0.0, line.latency - line.occupied)
    opens = {channel: parts[queue[-1]].released for channel, queue in queues.items()}
    left = {channel: line.taken(parts[queue[-1]].nbytes) for channel, queue in queues.items()}
    now = 0.0
    while opens:
        waiting = [channel for channel, at in opens.items() if at <= now]
        if not waiting:
            now = min(opens.values())
            continue
        channel = max(waiting)
        more_urgent = [at for other, at in opens.items() if other > channel and at > now]
        until = min(more_urgent, default=now + left[channel])
        if until < now + left[channel]:
            left[channel], now = left[channel] - (until - now), until
            continue
        now += left[channel]
        queue = queues[channel]
        free = arrives[queue.pop()] = now + beside
        if queue:
            opens[channel] = max(free, parts[queue[-1]].released)
            left[channel] = line.taken(parts[queue[-1]].nbytes)
        else:
            del opens[channel]
    return arrives


@dataclass(frozen=True, slots=True)
class Plan:
    """The rounds of a step. Parts in the order of need.

    Attributes:
        ends: of each part, in bytes of the vector.
        channels: of each part, from 0; a higher one is more urgent.
        seconds: the step's time, as predicted.
        single: the same with the same rounds on one channel.
    """

    ends: tuple[int, ...]
    channels: tuple[int, ...]
    seconds: float
    single: float

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the bytes that each channel has."""
        nbytes = [0] * (max(self.channels) + 1)
        for (first, last), channel in zip(pairwise((0, *self.ends)), self.channels, strict=True):
            nbytes[channel] += last - first
        return tuple(each / self.ends[-1] for each in nbytes)

    @property
    def rounds(self) -> tuple[Sequence[int], ...]:
        """Its parts and their channels: plans with the same ones are the same, whatever they are predicted to take."""
        return self.ends, self.channels

    def alone(self) -> Plan:
        """The same rounds on one channel."""
        return Plan(self.ends, (0,) * len(self.channels), self.single, self.single)

    @property
    def room(self) -> int:
        """Bytes of the largest part of each channel: so many may be open at a time."""
        most = [0] * (max(self.channels) + 1)
        for (first, last), channel in zip(pairwise((0, *self.ends)), self.channels, strict=True):
            most[channel] = max(most[channel], last - first)
        return sum(most)


def equal_shares(timing: Timing, line: Line, channels: int, rounds: int, grain: int = 1) -> Plan:
    """A plan of so many rounds, in equal numbers on all channels: the first one of a phase."""
    parts = cut(timing, rounds, grain)
    cuts = _equal_cuts(min(channels, len(parts)), len(parts))
    return planned(timing, line, parts, _channels(len(parts), cuts))


def planned(timing: Timing, line: Line, parts: Sequence[Part], channels: Sequence[int]) -> Plan:
    """These parts on these channels as a plan, with its prediction."""
    seconds = step_seconds(timing, line, parts, channels)
    single = step_seconds(timing, line, parts, (0,) * len(parts))
    return Plan(tuple(part.last for part in parts), tuple(channels), seconds, single)


def plan_for(
    timing: Timing,
    line: Line,
    *,
    channels: int,
    hosts: int,
    rounds: int = MOST_ROUNDS,
    least: int = 1,
    grain: int = 1,
    inside: bool = True,
) -> Plan:
    """The plan of the least predicted time; one channel, where several are not 3 % better than it.

    Parts in front may be smaller than those behind them: forward waits for the first ones, whose gradients come last.
    No plan has more bytes open at a time than the fewest parts of equal size have.

    Args:
        channels: at most so many.
        hosts: members, which share the control frames out.
        rounds: of a step, at most; `least`, at least, if the parts are that many.
        grain: bytes of a fragment. Every part but the last one is a multiple of it.
        inside: parts end inside parameters, too. Otherwise each ends where a parameter does, whatever `grain` is.
    """
    control = CONTROL_FRAMES / (hosts + 1) * _CONTROL_SHARE / 2
    counts = [
        count
        for count in range(channels, rounds + 1, channels)
        if count >= min(least, rounds // channels * channels)
    ]
    if not counts:
        raise ValueError(f"{rounds} rounds are too few for {channels} channels")
    found: list[Plan] = []
    for count, growth in product(counts, _GROWTHS):
        parts = cut(timing, count, grain, growth, whole=inside)
        if not inside:
            parts = parts_at(timing, nearest_ends([part.last for part in parts], timing.nbytes))
        plan = _descend(timing, line, parts, min(channels, len(parts)))
        few = len(parts) <= max(channels, plan.seconds * control)
        # The first plan has the fewest parts, and equal ones: it is always possible.
        if not found or (few and plan.room <= found[0].room):
            found.append(plan)
    best, single = _simplest(found), _simplest([plan.alone() for plan in found])
    return single if single.seconds < best.seconds * _PAYS else best


def _simplest(plans: Sequence[Plan]) -> Plan:
    """Of those that are about the shortest, the one with the fewest rounds."""
    most = min(plan.seconds for plan in plans) * _SIMPLER
    return min(
        (plan for plan in plans if plan.seconds <= most),
        key=lambda plan: (len(plan.ends), plan.seconds),
    )


def _equal_cuts(channels: int, parts: int) -> list[int]:
    """The first part of each channel but the most urgent one's, front-most first."""
    return [parts * at // channels for at in range(1, channels)]


def _channels(parts: int, cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(index < cut for cut in cuts) for index in range(parts))


def _descend(timing: Timing, line: Line, parts: Sequence[Part], channels: int) -> Plan:
    """From equal shares, each cut is moved as long as that helps."""

    def seconds(cuts: Sequence[int]) -> float:
        return step_seconds(timing, line, parts, _channels(len(parts), cuts))

    cuts = _equal_cuts(channels, len(parts))
    best = seconds(cuts)
    moved = True
    while moved:
        moved = False
        for at in range(len(cuts)):
            for step in (-1, 1):
                while True:
                    fresh = [*cuts[:at], cuts[at] + step, *cuts[at + 1 :]]
                    edges = [0, *fresh, len(parts)]
                    if any(first >= last for first, last in pairwise(edges)):
                        break
                    if (took := seconds(fresh)) >= best:
                        break
                    cuts, best, moved = fresh, took, True
    return planned(timing, line, parts, _channels(len(parts), cuts))
