# SPDX-License-Identifier: Apache-2.0
"""A gradient as JSON of a fixed form (R8), for programs that share nothing else with the trainer.

    {"format": "nicps-gradient", "version": 1, "samples": 128, "parameters": [
        {"name": "0.weight", "shape": [2, 3], "dtype": "float32", "values": [0.5, ...]}, ...]}

`docs/gradient-json.md` describes the form. Numbers are written as the shortest decimals that read
back as the same float32, so every finite value survives bit for bit, -0.0 and subnormals too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from nicps.errors import GradientFormatError

FORMAT = "nicps-gradient"
VERSION = 1
MAX_SAMPLES = 2**32 - 1  # the wire's field has 32 bits
# Text becomes a float64 first. This one decimal lies so close to the middle between two float32 that
# rounding twice gives the wrong one; all others were tried, and come back.
ROUNDED_TWICE = 7.038531e-26
ROUNDED_TWICE_RESULT = np.uint32(0x15AE43FD).view(np.float32)

Array = npt.NDArray[np.float32]


def dumps(named: Mapping[str, npt.NDArray[Any]], samples: int) -> bytes:
    """A gradient as JSON, parameters in the mapping's order.

    Args:
        named: float32 arrays of any shape by parameter name, the sum over `samples` samples.
        samples: how many samples are summed up in it.

    Raises:
        GradientFormatError: an array is not float32 or not finite, or `samples` is out of range.
    """
    return orjson.dumps(document(named, samples), option=orjson.OPT_SERIALIZE_NUMPY)


def document(named: Mapping[str, npt.NDArray[Any]], samples: int) -> dict[str, Any]:
    """What `dumps` writes, before it is text; its values are NumPy arrays (`OPT_SERIALIZE_NUMPY`).

    Raises:
        GradientFormatError: as `dumps`.
    """
    _check_samples(samples)
    parameters = []
    for name, array in named.items():
        if array.dtype != np.float32:
            raise GradientFormatError(f"parameter {name!r}: dtype is {array.dtype}, float32 is due")
        _check_finite(name, array)
        parameters.append(
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": "float32",
                "values": np.ascontiguousarray(array).reshape(-1),
            }
        )
    return {"format": FORMAT, "version": VERSION, "samples": samples, "parameters": parameters}


def loads(data: bytes | str, expected: Mapping[str, Sequence[int]]) -> tuple[dict[str, Array], int]:
    """Read what `dumps` wrote and hold it against a model.

    Args:
        data: the JSON.
        expected: the shape of every parameter by name.

    Returns:
        float32 arrays by name in the order of `expected`, and the number of samples.

    Raises:
        GradientFormatError: it does not fit; the message names the parameter.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise GradientFormatError(f"this is not JSON: {error}") from None
    return read(value, expected)


def read(document: Any, expected: Mapping[str, Sequence[int]]) -> tuple[dict[str, Array], int]:
    """`loads` for what is already read from JSON, as part of a larger message.

    Raises:
        GradientFormatError: as `loads`.
    """
    parameters = _check_envelope(document)
    found: dict[str, Array] = {}
    for position, entry in enumerate(parameters):
        name = _field(entry, "name", str, f"parameter number {position + 1}")
        if name not in expected:
            raise GradientFormatError(f"parameter {name!r}: the model has none of that name")
        if name in found:
            raise GradientFormatError(f"parameter {name!r} is there twice")
        found[name] = _array(entry, name, tuple(expected[name]))
    for name in expected:
        if name not in found:
            raise GradientFormatError(f"parameter {name!r} is missing")
    return {name: found[name] for name in expected}, document["samples"]


def _check_envelope(document: Any) -> list[Any]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GradientFormatError(f'this is no gradient: "format" must be "{FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise GradientFormatError(f"version {version!r} is unknown; this nicps reads {VERSION}")
    _check_samples(document.get("samples"))
    unknown = document.keys() - {"format", "version", "samples", "parameters"}
    if unknown:
        raise GradientFormatError(f"unknown key {min(unknown)!r} in the gradient")
    return list(_field(document, "parameters", list, "the gradient"))


def _check_samples(samples: Any) -> None:
    if type(samples) is not int or not 0 < samples <= MAX_SAMPLES:
        raise GradientFormatError(
            f"samples is {samples!r}; it must be a whole number from 1 to {MAX_SAMPLES}"
        )


def _field(entry: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict):
        raise GradientFormatError(f"{where} is not an object")
    if type(entry.get(key)) is not kind:
        raise GradientFormatError(f"{where}: {key!r} is missing or no {kind.__name__}")
    return entry[key]


def _array(entry: Any, name: str, shape: tuple[int, ...]) -> Array:
    where = f"parameter {name!r}"
    unknown = entry.keys() - {"name", "shape", "dtype", "values"}
    if unknown:
        raise GradientFormatError(f"{where}: unknown key {min(unknown)!r}")
    dtype = _field(entry, "dtype", str, where)
    if dtype != "float32":
        raise GradientFormatError(f"{where}: dtype is {dtype!r}, float32 is due")
    given = _field(entry, "shape", list, where)
    if any(type(size) is not int for size in given) or tuple(given) != shape:
        raise GradientFormatError(f"{where}: shape is {given}, the model's is {list(shape)}")
    values = _field(entry, "values", list, where)
    count = int(np.prod(shape, dtype=np.int64))
    if len(values) != count:
        raise GradientFormatError(f"{where}: {len(values)} values, its shape holds {count}")
    if set(map(type, values)) - {float, int}:
        wrong = next(value for value in values if type(value) not in (float, int))
        raise GradientFormatError(f"{where}: {wrong!r} is not a number")
    wide = np.array(values, dtype=np.float64)
    with np.errstate(over="ignore"):  # an overflow becomes an infinity and is refused below
        array = wide.astype(np.float32)
    wrong = np.abs(wide) == ROUNDED_TWICE
    if wrong.any():
        array[wrong] = np.copysign(ROUNDED_TWICE_RESULT, wide[wrong])
    array = array.reshape(shape)
    _check_finite(name, array)
    return array


def _check_finite(name: str, array: npt.NDArray[Any]) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        index = int(np.argmin(finite))
        value = array.reshape(-1)[index]
        raise GradientFormatError(f"parameter {name!r}: value {index} is {value}, not finite")
