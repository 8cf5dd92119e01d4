# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as a file, a layout and digests.

NumPy only: a program without PyTorch can start from the same weights, find its way in the vector,
and prove that it has the same bits.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trainer.errors import JobError

Arrays = Mapping[str, npt.NDArray[Any]]
Layout = list[dict[str, Any]]
"""One entry a tensor, as in prepared.json: name, kind, shape, dtype. First those that make up the
round's vector, in its order: kind "parameter" (trained), then "buffer" (float32, averaged), or both
by sets (B1); then "fixed" (frozen parameters, other buffers: never changed; float32 buffers come
last)."""

IN_VECTOR = ("parameter", "buffer")


def save(path: Path, arrays: Arrays) -> None:
    """Write tensors by name as .npz, the same bytes every time."""
    with path.open("wb") as file:
        write(file, arrays)


def write(file: IO[bytes], arrays: Arrays, texts: Mapping[str, bytes] | None = None) -> None:
    """Write tensors by name, behind `texts` by file name, as .npz into an open file."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (texts or {}).items():
            archive.writestr(zipfile.ZipInfo(name), content)
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # its date is fixed
            with archive.open(entry, "w", force_zip64=True) as inside:
                np.lib.format.write_array(inside, array, allow_pickle=False)


def load(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read what `save` wrote.

    Raises:
        JobError: it is not there or not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise JobError(f"cannot read the model in {path}: {error}") from None


def averaged(layout: Layout) -> frozenset[str]:
    """The buffers that are averaged."""
    return frozenset(entry["name"] for entry in layout if entry["kind"] == "buffer")


def averaging(layout: Layout, names: Collection[str]) -> Layout:
    """The layout of a model of whose buffers only these are averaged, out of one in which more are."""
    fixed = [
        entry | {"kind": "fixed"}
        for entry in layout
        if entry["kind"] == "buffer" and entry["name"] not in names
    ]
    return [e for e in layout if e["kind"] != "buffer" or e["name"] in names] + fixed


def order(layout: Layout) -> list[str]:
    """The tensors of the round's vector, in its order."""
    return [entry["name"] for entry in layout if entry["kind"] in IN_VECTOR]


def lanes(layout: Layout) -> int:
    """Length of the round's vector in float32."""
    return sum(size(entry) for entry in layout if entry["kind"] in IN_VECTOR)


def size(entry: Mapping[str, Any]) -> int:
    """Numbers in a tensor."""
    return int(np.prod(entry["shape"], dtype=np.int64))


def model_digest(layout: Layout, state: str) -> str:
    """SHA-256 over names, kinds, shapes, dtypes and the state's digest: what all members must agree on."""
    sha = hashlib.sha256(json.dumps(layout, sort_keys=True).encode())
    sha.update(state.encode())
    return sha.hexdigest()


def weights_sha256(layout: Layout, arrays: Arrays) -> str:
    """SHA-256 over all tensors' bytes in the layout's order: after every round equal everywhere."""
    sha = hashlib.sha256()
    for entry in layout:
        sha.update(arrays[entry["name"]].tobytes())
    return sha.hexdigest()


def check(layout: Layout, arrays: Arrays) -> None:
    """Hold the weights that were handed out against the model that was built here.

    Raises:
        JobError: naming the first tensor that does not fit.
    """
    for entry in layout:
        name, here = entry["name"], (tuple(entry["shape"]), entry["dtype"])
        if name not in arrays:
            raise JobError(f"the model differs from the one handed out: {name!r} is only here")
        there = (arrays[name].shape, arrays[name].dtype.name)
        if here != there:
            raise JobError(
                f"the model differs from the one handed out: {name!r} is {here[1]} {here[0]} here, "
                f"{there[1]} {there[0]} there"
            )
    missing = arrays.keys() - {entry["name"] for entry in layout}
    if missing:
        raise JobError(
            f"the model differs from the one handed out: {min(missing)!r} is missing here"
        )
