# SPDX-License-Identifier: Apache-2.0
"""What all ranks agree on of a script's parts: each says what it has, and that of the lowest rank counts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nicps.collective import Group
from nicps.collective.lanes import I32
from nicps.errors import UsageProblem
from nicps.need_first import MOST_ROUNDS
from nicps.torch.shares import Shares

_HEAD = 5
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Agreed:
    """Attributes:
    order: of the parameters, by their places in the model, as the forward pass needs them.
    steps: made in parts so far.
    predicted_s: seconds of a step with these shares; None: not known.
    """

    order: tuple[int, ...]
    shares: Shares
    steps: int = 0
    predicted_s: float | None = None

    def pack(self, known: int) -> I32:
        """As it is summed up; `known`: a checksum of model and settings."""
        cuts, channels = self.shares.cuts, self.shares.channels
        predicted = _UNKNOWN if self.predicted_s is None else round(self.predicted_s * 1e6)
        row = np.zeros(_length(len(self.order)), np.int32)
        row[:_HEAD] = known, 1, self.steps, predicted, len(channels)
        at = _HEAD + MOST_ROUNDS
        row[_HEAD : _HEAD + len(cuts)] = cuts
        row[at : at + len(channels)] = channels
        row[at + MOST_ROUNDS :] = self.order
        return row

    @classmethod
    def unpack(cls, row: I32) -> Agreed:
        """What `pack` has made."""
        _, _, steps, predicted, parts = (int(word) for word in row[:_HEAD])
        words, at = row.tolist(), _HEAD + MOST_ROUNDS
        shares = Shares(tuple(words[_HEAD : _HEAD + parts - 1]), tuple(words[at : at + parts]))
        known = None if predicted == _UNKNOWN else predicted / 1e6
        return cls(tuple(words[at + MOST_ROUNDS :]), shares, steps, known)


def agree(group: Group, mine: Agreed | None, parameters: int, known: int) -> Agreed | None:
    """What the lowest rank has that has something; None if none has. All ranks call it.

    Args:
        mine: what this rank has.
        parameters: their number.
        known: a checksum of what must be the same at all ranks.

    Raises:
        UsageProblem: the ranks' models or settings differ. All of them get it.
    """
    table = np.zeros((group.size, _length(parameters)), np.int32)
    head = np.zeros((group.size, 2), np.int32)
    head[group.rank] = known, parameters
    rows = group.all_reduce(head.reshape(-1)).result().reshape(head.shape)
    there = [rank for rank in range(group.size) if rows[rank, 0]]
    if differ := [rank for rank in there if tuple(rows[rank]) != tuple(rows[there[0]])]:
        names = ", ".join(f"{group.names[rank]} (rank {rank})" for rank in differ)
        raise UsageProblem(
            f"the model or the settings of overlap() at {names} are not those of {group.names[there[0]]} (rank"
            f" {there[0]}): start the same script on every host"
        )
    if mine is not None:
        table[group.rank] = mine.pack(known)
    found = group.all_reduce(table.reshape(-1)).result().reshape(table.shape)
    having = np.flatnonzero(found[:, 1])
    return Agreed.unpack(found[having[0]]) if len(having) else None


def checksum(*facts: object) -> int:
    """Of 31 bits, above 0."""
    return (zlib.crc32(repr(facts).encode()) & 0x7FFFFFFF) or 1


def _length(parameters: int) -> int:
    return _HEAD + 2 * MOST_ROUNDS + parameters


def in_order(names: Sequence[str], order: Sequence[str]) -> tuple[int, ...]:
    """The places of all names: first those in `order`, then the others."""
    place = {name: at for at, name in enumerate(names)}
    first = [place[name] for name in order if name in place]
    return (*first, *(at for at in range(len(names)) if at not in set(first)))
