# SPDX-License-Identifier: Apache-2.0
"""B1: branches in two sets of near-equal size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer import weights
from trainer.branches import UNEQUAL, Item

#: Parameters in a fragment that is pulled.
FRAGMENT = 360
_EXACT = 64  # items whose best division is looked for
_NAMED = 4  # branches of a set, where it is described
_FINE = 1 << 20  # parameters; with fewer an item counts as what it has, not in fragments


@dataclass(frozen=True, slots=True)
class Sets:
    """B1: the two sets. The first one has the model's first item."""

    items: tuple[tuple[Item, ...], tuple[Item, ...]]

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters that are trained, of each."""
        first, second = (sum(item.size for item in items) for items in self.items)
        return first, second

    def order(self, need: Sequence[str] = ()) -> list[str]:
        """All names as they lie in the vector: set 1 first, in each set buffers first.

        Args:
            need: names in the order in which the forward pass needs them; by default the model's.

        BatchNorm changes its buffers in the forward pass. At the beginning of a set they are there before its modules.
        The fragment in which both sets meet is late for a member that pulls set 2 from the servers: so that set begins
        with what it needs last, as many parameters as fill a fragment.
        """
        rank = {name: at for at, name in enumerate(need)}
        (first, first_buffers), (second, buffers) = map(_tensors, self.items)
        for part in (first, second):
            part.sort(key=lambda entry: rank.get(entry[0], len(rank)))
        at, held = len(second), 0
        while at and held < FRAGMENT:
            at -= 1
            held += second[at][1]
        first_names, last, others = (
            [name for name, _ in part] for part in (first, second[at:], second[:at])
        )
        return [*first_buffers, *first_names, *last, *buffers, *others]

    def lanes(self, layout: weights.Layout) -> tuple[int, int]:
        """Numbers of each set in the round's vector."""
        firsts = {name for item in self.items[0] for name in item.tensors}
        first = weights.lanes([entry for entry in layout if entry["name"] in firsts])
        return first, weights.lanes(layout) - first

    def describe(self) -> str:
        """Which branches are in which set, and how large both are, in one line."""
        first, second = self.sizes
        one, two = map(_describe, self.items)
        return f"set 1 has {first:,} parameters: {one}; set 2 has {second:,}: {two}"

    def warning(self) -> str | None:
        """What to say if no branch is in them, or if they are not near-equal."""
        first, second = self.sizes
        if not any(item.is_branch for items in self.items for item in items):
            return (
                f"the model has no parallel branches, and two sets of layers, of {first:,} and {second:,} parameters: "
                "partners share the transfer, but a worker computes little before all parameters have come "
                "(docs/jobs.md)"
            )
        if abs(first - second) < UNEQUAL * (first + second):
            return None
        part = abs(first - second) / (first + second)
        return (
            f"the two sets of branches have {first:,} and {second:,} parameters: they differ by {part:.0%} of all; "
            "branches(model) in job.py can name other branches (docs/jobs.md)"
        )


def _describe(items: Iterable[Item]) -> str:
    """The names of the first branches, and how many other items there are."""
    branches, others = [], 0
    for item in items:
        if item.is_branch:
            branches.append(" to ".join(dict.fromkeys((item.modules[0], item.modules[-1]))))
        else:
            others += 1
    more = len(branches) - _NAMED
    counts = [f"{more} more"] * (more > 0) + [f"{others} in no branch"] * (others > 0)
    return ", ".join([*branches[:_NAMED], *counts])


def _tensors(items: Iterable[Item]) -> tuple[list[tuple[str, int]], list[str]]:
    """Parameters with their sizes, and buffers."""
    parameters: list[tuple[str, int]] = []
    buffers: list[str] = []
    for item in items:
        parameters += zip(item.parameters, item.numbers, strict=True)
        buffers += item.buffers
    return parameters, buffers


def pack(items: Sequence[Item]) -> Sets:
    """B1: the items in two sets by their sizes: the largest first, and the last 64 as well as they can be.

    Args:
        items: in the model's order.
    """
    by_size = sorted(range(len(items)), key=lambda at: (-items[at].size, at))
    greedy, exact = by_size[:-_EXACT], by_size[-_EXACT:]
    chosen: set[int] = set()
    ahead = 0  # the size of what is chosen, less that of the others
    for at in greedy:
        if ahead <= 0:
            chosen.add(at)
        ahead += items[at].size if at in chosen else -items[at].size
    unit = 1 if sum(item.size for item in items) < _FINE else FRAGMENT
    sizes = [round(items[at].size / unit) for at in exact]
    chosen.update(exact[at] for at in _subset(sizes, (sum(sizes) - round(ahead / unit)) / 2))
    if 0 not in chosen:
        chosen = set(range(len(items))) - chosen
    first = tuple(item for at, item in enumerate(items) if at in chosen)
    return Sets((first, tuple(item for at, item in enumerate(items) if at not in chosen)))


def _subset(sizes: Sequence[int], target: float) -> list[int]:
    """Places of the sizes whose sum is nearest to `target`."""
    sums = [1]  # bit s of entry k: the first k sizes have a subset with the sum s
    for size in sizes:
        sums.append(sums[-1] | sums[-1] << size)
    middle = min(max(int(target), 0), sum(sizes))
    below = (sums[-1] & ((2 << middle) - 1)).bit_length() - 1
    above = sums[-1] >> (middle + 1)
    best = below
    if above:
        next_one = middle + (above & -above).bit_length()
        best = below if target - below <= next_one - target else next_one
    found = []
    for at in reversed(range(len(sizes))):
        if not sums[at] >> best & 1:
            found.append(at)
            best -= sizes[at]
    return found


def fragments(layout: weights.Layout) -> dict[str, range]:
    """Of each tensor in the round's vector, the fragments in which it lies."""
    found, at = {}, 0
    for entry in layout:
        if entry["kind"] in weights.IN_VECTOR:
            end = at + weights.size(entry)
            found[entry["name"]] = range(at // FRAGMENT, -(-end // FRAGMENT))
            at = end
    return found
