# SPDX-License-Identifier: Apache-2.0
"""Data sets as files of records of one size, so that a member's shard is a range of bytes (R6).

A record is its fields one after another, without padding, little-endian. NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.errors import JobError

CHUNK_BYTES = 16 << 20
KINDS = "biuf"  # bool, whole numbers, floats


class Records:
    """A record file, mapped into memory."""

    def __init__(self, path: Path, fields: list[dict[str, Any]]) -> None:
        """Map `path`; `fields` as in prepared.json.

        Raises:
            JobError: the file is not there, or ends within a record.
        """
        self._type = record_type(fields)
        self.fields = fields
        try:
            size = path.stat().st_size
        except OSError as error:
            raise JobError(f"no data in {path}: {error.strerror}") from None
        if size % self._type.itemsize:
            raise JobError(f"{path} is cut off: {size} bytes, {self._type.itemsize} a record")
        self._rows = (
            np.memmap(path, self._type, "r") if size else np.empty(0, self._type)
        )  # an empty file cannot be mapped

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, index: npt.NDArray[Any] | slice) -> dict[str, npt.NDArray[Any]]:
        """Contiguous arrays by field name of the records `index`, shape (len(index), *shape)."""
        rows = self._rows[index]
        # A copy even of a single record: NumPy calls that contiguous, with the record's stride, which PyTorch refuses.
        return {field["name"]: rows[field["name"]].copy() for field in self.fields}


def record_type(fields: list[dict[str, Any]]) -> np.dtype[Any]:
    """The packed NumPy dtype of a record."""
    return np.dtype(
        [
            (field["name"], np.dtype(field["dtype"]).newbyteorder("<"), tuple(field["shape"]))
            for field in fields
        ]
    )


def fields_of(what: str, arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields as in prepared.json: name, dtype, shape of one sample.

    Args:
        what: "train" or "test", for messages.
        arrays: NumPy arrays by name, all of the same length.

    Raises:
        JobError: not such arrays.
    """
    if not isinstance(arrays, Mapping) or not arrays:
        raise JobError(f"job.py: data(): {what} must be NumPy arrays by name, not {arrays!r:.60}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim < 1 or array.dtype.kind not in KINDS:
            kind = getattr(array, "dtype", type(array).__name__)
            raise JobError(
                f"job.py: data(): {what}[{name!r}] must be a NumPy array of numbers with the "
                f"samples along its first axis, not {kind}"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise JobError(f"job.py: data(): {what} has fields of different lengths: {lengths}")
    return [
        {"name": name, "dtype": array.dtype.name, "shape": list(array.shape[1:])}
        for name, array in arrays.items()
    ]


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]], order: npt.NDArray[Any]) -> int:
    """Write the samples in `order`; returns the bytes of one record."""
    kind = record_type(fields_of(path.stem, arrays))
    step = max(1, CHUNK_BYTES // kind.itemsize)
    with path.open("wb") as file:
        for first in range(0, len(order), step):
            part = order[first : first + step]
            rows = np.empty(len(part), kind)
            for name, array in arrays.items():
                rows[name] = array[part]
            file.write(rows.tobytes())
    return kind.itemsize


def shard(records: int, number: int, members: int) -> tuple[int, int]:
    """The first record of member `number`'s shard, and the one after its last."""
    return records * (number - 1) // members, records * number // members


@dataclass(frozen=True)
class Place:
    """A member's place among those that take part in a phase: `rank` (from 1) of `count`; `share` samples a round.

    Who does not take part has rank and share 0.
    """

    rank: int
    count: int
    share: int

    @classmethod
    def of(cls, number: int, shares: Sequence[int]) -> Place:
        """The place of member `number`, where `shares` are the members' parts of a round by number."""
        share = shares[number - 1] if number <= len(shares) else 0
        rank = sum(1 for before in shares[:number] if before) if share else 0
        return cls(rank, sum(1 for each in shares if each), share)


class Part:
    """What a member works of a data set, as long as its place is the same.

    Args:
        records: all that this host has.
        place: the member's.
        number: the member's; None where all hosts have all records, and its place says which are its own (R21).
    """

    def __init__(self, records: Records, place: Place, number: int | None, seed: int) -> None:
        first, end = 0, len(records)
        if number is None:
            first, end = shard(end, place.rank, place.count) if place.rank else (0, 0)
        self._records, self._first = records, first
        self._length = end - first if place.rank else 0
        self._order = Order(self._length, seed, place.rank if number is None else number)

    def __len__(self) -> int:
        return self._length

    def indices(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """Which records to train on at positions position .. position + count - 1 since the beginning."""
        return self._first + self._order.take(position, count)

    def take(self, index: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """The records that `indices` gave, as `Records.take` does."""
        return self._records.take(index)

    def batches(self, size: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """All records once, `size` at a time."""
        end = self._first + self._length
        for first in range(self._first, end, size):
            yield self._records.take(slice(first, min(first + size, end)))


class Order:
    """The order in which a member takes its shard's samples: a new permutation every epoch.

    It is a function of (seed, member, position): the same after a round that was aborted, and known
    to who takes the shard over.
    """

    def __init__(self, records: int, seed: int, number: int) -> None:
        self._records = records
        self._key = (seed, number)
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Indices of the samples at positions first .. first + count - 1 since the beginning."""
        parts = []
        while count > 0:
            epoch, start = divmod(first, self._records)
            if epoch != self._epoch:
                generator = np.random.default_rng((*self._key, epoch))
                self._permutation = generator.permutation(self._records)
                self._epoch = epoch
            part = self._permutation[start : start + count]
            parts.append(part)
            first += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
