# SPDX-License-Identifier: Apache-2.0
"""R8: a gradient to JSON and back, and everything that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nicps import gradient_json
from nicps.errors import GradientFormatError

SHAPES = {"w": (2, 3), "b": (2,)}


def document() -> dict[str, Any]:
    gradient: dict[str, np.ndarray] = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
        "b": np.array([-0.0, 1e-45], dtype=np.float32),
    }
    loaded: dict[str, Any] = orjson.loads(gradient_json.dumps(gradient, 7))
    return loaded


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_every_finite_float32_comes_back_bit_for_bit(array: np.ndarray) -> None:
    text = gradient_json.dumps({"w": array}, samples=3)
    back, samples = gradient_json.loads(text, {"w": array.shape})
    assert samples == 3
    assert back["w"].shape == array.shape
    assert back["w"].tobytes() == array.tobytes()


def test_random_bit_patterns_come_back() -> None:
    bits = np.random.default_rng(5).integers(0, 2**32, 300_000, dtype=np.uint32)
    edges = np.array([0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, 1.1754942e-38], dtype=np.float32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], edges])
    back, _ = gradient_json.loads(gradient_json.dumps({"w": values}, 1), {"w": values.shape})
    assert np.array_equal(back["w"].view(np.uint32), values.view(np.uint32))


def test_the_one_decimal_that_rounds_twice_comes_back() -> None:
    """The only float32 whose shortest decimal, read as float64 and rounded, is another float32."""
    bits = np.array([0x15AE43FD, 0x95AE43FD, 0x15AE43FE], dtype=np.uint32)
    text = gradient_json.dumps({"w": bits.view(np.float32)}, 1)
    assert b"7.038531e-26" in text
    back, _ = gradient_json.loads(text, {"w": (3,)})
    assert back["w"].view(np.uint32).tolist() == bits.tolist()


def test_arrays_need_not_be_contiguous() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    back, _ = gradient_json.loads(gradient_json.dumps({"w": array}, 1), {"w": (3, 2)})
    assert np.array_equal(back["w"], array)


def test_parameters_come_back_in_the_models_order() -> None:
    content = document()
    content["parameters"].reverse()
    back, samples = gradient_json.loads(json.dumps(content), SHAPES)
    assert list(back) == ["w", "b"]
    assert samples == 7


def _change(key: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        content["parameters"][0][key] = value

    return change


REFUSED = {
    "no json": (b"{", "not JSON"),
    "not an object": (b"[]", "format"),
    "unknown name": (_change("name", "x"), "'x': the model has none"),
    "no name": (_change("name", None), "parameter number 1: 'name'"),
    "missing name": (lambda d: d["parameters"].pop(), "'b' is missing"),
    "twice": (lambda d: d["parameters"].append(d["parameters"][0]), "'w' is there twice"),
    "shape": (_change("shape", [3, 2]), r"'w': shape is \[3, 2\], the model's is \[2, 3\]"),
    "shape of floats": (_change("shape", [2.0, 3]), "'w': shape is"),
    "shape of booleans": (_change("shape", [True, 3]), "'w': shape is"),
    "dtype": (_change("dtype", "float64"), "'w': dtype is 'float64'"),
    "too few": (_change("values", [0.5] * 5), "'w': 5 values, its shape holds 6"),
    "too many": (_change("values", [0.5] * 7), "'w': 7 values, its shape holds 6"),
    "null": (_change("values", [0.5] * 5 + [None]), "'w': None is not a number"),
    "string": (_change("values", [0.5] * 5 + ["1"]), "'w': '1' is not a number"),
    "boolean": (_change("values", [0.5] * 5 + [True]), "'w': True is not a number"),
    "nested": (_change("values", [[0.5]] * 6), "'w': .* is not a number"),
    "too large": (_change("values", [0.5] * 5 + [1e39]), "'w': value 5 is inf"),
    "huge whole number": (_change("values", [0.5] * 5 + [10**30]), None),
    "unknown key": (_change("scale", 2), "'w': unknown key 'scale'"),
    "no values": (lambda d: d["parameters"][0].pop("values"), "'w': 'values' is missing"),
    "entry no object": (lambda d: d["parameters"].insert(0, 3), "number 1 is not an object"),
    "version": (lambda d: d.update(version=2), "version 2"),
    "format": (lambda d: d.update(format="x"), "format"),
    "no samples": (lambda d: d.pop("samples"), "samples is None"),
    "zero samples": (lambda d: d.update(samples=0), "samples is 0"),
    "samples true": (lambda d: d.update(samples=True), "samples is True"),
    "too many samples": (lambda d: d.update(samples=2**32), "samples is 4294967296"),
    "key": (lambda d: d.update(loss=1), "'loss'"),
    "no parameters": (lambda d: d.pop("parameters"), "'parameters' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    change, message = REFUSED[case]
    text = change
    if callable(change):
        content = document()
        change(content)
        text = json.dumps(content).encode()
    if message is None:  # in range for a float32, however it is written
        gradient_json.loads(text, SHAPES)
        return
    with pytest.raises(GradientFormatError, match=message):
        gradient_json.loads(text, SHAPES)


def test_json_has_no_nan() -> None:
    text = json.dumps(document()).replace("1.25", "NaN")
    with pytest.raises(GradientFormatError, match="not JSON"):
        gradient_json.loads(text, SHAPES)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0, np.nan], dtype=np.float32), "'w': value 1 is nan"),
        (np.array([[np.inf]], dtype=np.float32), "'w': value 0 is inf"),
        (np.zeros(2), "'w': dtype is float64"),
    ],
)
def test_writing_refuses(array: np.ndarray, message: str) -> None:
    with pytest.raises(GradientFormatError, match=message):
        gradient_json.dumps({"w": array}, 1)


def test_the_documents_example_is_read(checkout: Path) -> None:
    text = (checkout / "docs" / "gradient-json.md").read_text()
    example = text.split("```json\n")[1].split("```")[0]
    gradients, samples = gradient_json.loads(example, {"0.weight": (2, 3), "0.bias": (2,)})
    assert samples == 128
    assert np.signbit(gradients["0.weight"][0, 1])
