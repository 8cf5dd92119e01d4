# SPDX-License-Identifier: Apache-2.0
"""The loops of `nicps.session.loops`, and the child process in which numba compiles them.

`python -m nicps.session.loop_sources WIDTH` writes their machine code, for lanes of that width, to stdout: where each
begins, then the code. numba and its compiler take 50 MB, which stay in the child.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from nicps.session import elf
from nicps.session.lanes import F32, LEAST_EXPONENT, LaneFormat
from nicps.wire import NOT_FINITE

#: Where `quantise`, `read`, `keep` and `add` begin in the code behind it.
ENTRIES = struct.Struct("<4Q")

_MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF


def parameters(format: LaneFormat) -> tuple[tuple[Any, ...], ...]:
    """Those of each loop: `int` and `float`, or NumPy's types, of which it gets pointers."""
    number, lane, x, flag = np.float32, format.native, np.int8, np.int8
    rows = lane, int, x, int
    return (
        (number, number, int, *rows, int),
        (number, int, *rows, int),
        (flag, number, int, number, *rows, int),
        (number, np.int64, float, flag, int),
    )


def compiled(format: LaneFormat) -> bytes:
    """The machine code, behind `ENTRIES`.

    Raises:
        ImportError: numba is not installed, or does not fit NumPy.
        ValueError: the code needs more than can be linked.
    """
    import numba

    numba.extending.register_jitable(_swapped)
    code, entries = b"", []
    makers = (_quantise, _read, _keep, _add)
    for make, kinds in zip(makers, parameters(format), strict=True):
        linked, entry = elf.link(_object(numba, make(numba.carray, format), kinds))
        entries.append(len(code) + entry)
        code += linked
    return ENTRIES.pack(*entries) + code


def _object(numba: Any, function: Callable[..., None], kinds: tuple[Any, ...]) -> bytes:
    """The object file of a C function with these parameters."""
    scalars = {int: numba.int64, float: numba.float64}
    types = (scalars.get(k) or numba.types.CPointer(numba.from_dtype(np.dtype(k))) for k in kinds)
    signature = numba.types.void(*types)
    made = numba.cfunc(signature, nopython=True, error_model="numpy")(function)
    return _without_python(made.inspect_llvm(), made.native_name)


def _without_python(assembly: str, name: str) -> bytes:
    """The object file of that function only.

    numba's C functions report what the loop raises. These loops raise nothing. LLVM sees that once no other function
    of the module can be called from outside, and then drops all calls of Python.
    """
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(assembly)
    for function in module.functions:
        if not function.is_declaration and function.name != name:
            function.linkage = "internal"
    target, passes = _target(), llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    tuning = llvm.create_pipeline_tuning_options()
    passes.run(module, llvm.create_pass_builder(target, tuning))
    made: bytes = target.emit_object(module)
    return made


@functools.cache
def _target() -> Any:
    """This processor, for code that runs wherever it lies."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        llvm.get_host_cpu_name(), features, opt=3, reloc="pic", codemodel="small"
    )


# ---- what is compiled. A row is a fragment. From one to the next there are so many numbers: `stride` and `step`.

P: TypeAlias = Any  # a pointer


def _powers() -> F32:
    """2**x at 128 + x, for each x of 8 bits."""
    return np.ldexp(np.float32(1), np.arange(-128, 128, dtype=np.int32))


def _swapped(lane: Any, width: int) -> Any:
    """A lane's bytes in the other order, in the lowest bits."""
    if width == 8:
        return lane
    if width == 16:
        return ((lane & 0xFF) << 8) | ((lane >> 8) & 0xFF)
    outer = (lane << 24) | ((lane >> 24) & 0xFF)
    return outer | ((lane & 0xFF00) << 8) | ((lane >> 8) & 0xFF00)


def _quantise(carray: Any, format: LaneFormat) -> Callable[..., None]:
    width, per, native, powers = format.width, format.per_fragment, format.native, _powers()
    most = np.float32(math.ldexp(format.largest_lane, 1 - width))
    last = int(most.view(np.int32)) & _MANTISSA  # the mantissa of the largest lane

    def quantise(
        vector_: P, kept_: P, inside: int, lanes_: P, stride: int, xs_: P, step: int, rows: int
    ) -> None:
        vector, kept = carray(vector_, inside), carray(kept_, inside)
        lanes, exponents = carray(lanes_, rows * stride), carray(xs_, rows * step)
        for row in range(rows):
            at, end = min(row * per, inside), min(row * per + per, inside)
            value, left = vector[at:end], kept[at:end]
            out = lanes[row * stride : row * stride + per]
            top: Any = np.int32(0)
            for k in range(end - at):  # magnitudes compared as integers: NaN is above infinity
                bits = np.float32(value[k] + left[k]).view(np.int32)
                top = max(top, np.int32(bits & _MAGNITUDE))
            x = max((top >> 23) - 125 - width + ((top & _MANTISSA) > last), LEAST_EXPONENT)
            largest = np.int32(top).view(np.float32)
            if not np.isfinite(np.rint(largest * powers[128 - x]) * powers[128 + x]):
                x = NOT_FINITE
            exponents[row * step] = x
            filled = 0 if x == NOT_FINITE else end - at
            by = powers[128 - x]
            for k in range(filled):
                lane = np.int32(np.rint((value[k] + left[k]) * by))
                out[k] = native(_swapped(lane, width))
            for k in range(filled, per):
                out[k] = 0

    return quantise


def _read(carray: Any, format: LaneFormat) -> Callable[..., None]:
    width, per, native, powers = format.width, format.per_fragment, format.native, _powers()

    def read(out_: P, inside: int, lanes_: P, stride: int, xs_: P, step: int, rows: int) -> None:
        lanes, exponents = carray(lanes_, rows * stride), carray(xs_, rows * step)
        out = carray(out_, inside)
        for row in range(rows):
            at, end = min(row * per, inside), min(row * per + per, inside)
            value, given = out[at:end], lanes[row * stride : row * stride + per]
            x = exponents[row * step]
            by = np.float32(np.nan) if x == NOT_FINITE else powers[128 + x]
            for k in range(end - at):
                value[k] = np.float32(native(_swapped(given[k], width))) * by

    return read


def _keep(carray: Any, format: LaneFormat) -> Callable[..., None]:
    width, per, native, powers = format.width, format.per_fragment, format.native, _powers()

    def keep(
        lost_: P,
        vector_: P,
        inside: int,
        kept_: P,
        lanes_: P,
        stride: int,
        xs_: P,
        step: int,
        rows: int,
    ) -> None:
        vector, kept = carray(vector_, inside), carray(kept_, rows * per)
        lanes, exponents = carray(lanes_, rows * stride), carray(xs_, rows * step)
        lost = carray(lost_, rows)
        for row in range(rows):
            if lost[row]:
                continue
            at, end = min(row * per, inside), min(row * per + per, inside)
            value, left = vector[at:end], kept[row * per : row * per + per]
            given = lanes[row * stride : row * stride + per]
            by = powers[128 + exponents[row * step]]
            for k in range(end - at):
                sent = np.float32(native(_swapped(given[k], width))) * by
                left[k] = (left[k] + value[k]) - sent
            for k in range(end - at, per):
                left[k] = np.float32(0) - np.float32(native(_swapped(given[k], width))) * by

    return keep


def _add(carray: Any, format: LaneFormat) -> Callable[..., None]:
    per = format.per_fragment

    def add(kept_: P, remainders_: P, unit: float, used_: P, rows: int) -> None:
        kept, remainders = carray(kept_, rows * per), carray(remainders_, rows * per)
        used = carray(used_, rows)
        for row in range(rows):
            left, more = kept[row * per : row * per + per], remainders[row * per : row * per + per]
            if used[row]:
                for k in range(per):
                    left[k] += np.float32(more[k] * unit)
            else:
                for k in range(per):
                    left[k] += np.float32(0)  # -0.0 becomes 0.0

    return add


if __name__ == "__main__":
    sys.stdout.buffer.write(compiled(LaneFormat(1, int(sys.argv[1]))))
