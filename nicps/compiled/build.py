# SPDX-License-Identifier: Apache-2.0
"""The child process in which numba compiles loops, and what it does with each.

A module with loops makes their machine code if it is run (`python -m nicps.compiled.factors FD`), and writes it to a
file that its parent has opened: whatever a host's Python or numba prints is no part of it. numba and its compiler take
50 MB and 2 s of processor time, which stay in the child.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from nicps.compiled import elf
from nicps.compiled.machine_code import MachineCode, kept_or_made

#: Of a loop's parameters: `int` and `float`, or NumPy's types, of which it gets pointers.
Kinds = tuple[Any, ...]

_COMPILE_S = 30.0  # two seconds on an idle machine
_DIGEST_BYTES = hashlib.sha256().digest_size


class Loop(NamedTuple):
    """What is compiled to one C function."""

    function: Callable[..., None]
    kinds: Kinds
    #: LLVM's flags of what may be rounded otherwise than it is written; none: the bits are as written.
    freedom: frozenset[str] = frozenset()


def functions(
    name: str, module: ModuleType, kinds: Sequence[Kinds], basis: object, *arguments: object
) -> list[Callable[..., None]]:
    """The loops of a module, as C functions.

    Args:
        name: under which their code is kept.
        kinds: the parameters of each.
        basis: what determines the code beside compiler, processor, and the module's own text.
        arguments: of the module's command.

    Raises:
        Exception: they cannot be made here; which one depends on numba.
    """
    texts = (Path(str(each.__file__)).read_bytes() for each in (module, elf, sys.modules[__name__]))
    given = b"".join([repr(basis).encode(), *texts])
    code = kept_or_made(name, given, lambda: _compile(module, arguments))
    entries = _entries(len(kinds))
    mapped = MachineCode(code[entries.size :])
    return [
        mapped.function(at, each) for at, each in zip(entries.unpack_from(code), kinds, strict=True)
    ]


def _compile(module: ModuleType, arguments: Iterable[object]) -> bytes:
    """In a child process, with the same nicps as here."""
    ours = str(Path(__file__).resolve().parents[2])
    paths = [ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(os.memfd_create("nicps-made"), "w+b") as made:
        to = made.fileno()
        subprocess.run(
            [sys.executable, "-P", "-m", module.__name__, *map(str, (to, *arguments))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=[to],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILE_S,
            check=True,
        )
        made.seek(0)
        digest, code = made.read(_DIGEST_BYTES), made.read()
    if digest != hashlib.sha256(code).digest():
        # A parent that ignores SIGCHLD is told that every child went well.
        raise ValueError(f"{module.__name__} ended before its code was written")
    return code


def _entries(loops: int) -> struct.Struct:
    """Where each of so many loops begins in the code behind it."""
    return struct.Struct(f"<{loops}Q")


# ---- in the child process


def write(loops: Sequence[Loop]) -> None:
    """Compile, and write the code to the file whose descriptor is the first argument of this process.

    Raises:
        ImportError, ValueError: as `compiled`.
    """
    code = compiled(loops)
    with open(int(sys.argv[1]), "wb") as file:
        file.write(hashlib.sha256(code).digest() + code)


def compiled(loops: Sequence[Loop]) -> bytes:
    """The machine code, behind `_entries`.

    Raises:
        ImportError: numba is not installed, or does not fit NumPy.
        ValueError: the code needs more than can be linked.
    """
    import llvmlite.binding as llvm
    import numba

    # No loop becomes a call of memset or memcpy: these are not in the code.
    llvm.set_option("nicps", "-disable-loop-idiom-all")
    code, entries = b"", []
    for loop in loops:
        linked, entry = elf.link(_object(numba, loop))
        entries.append(len(code) + entry)
        code += linked
    return _entries(len(loops)).pack(*entries) + code


def _object(numba: Any, loop: Loop) -> bytes:
    """The object file of a C function with these parameters."""
    scalars = {int: numba.int64, float: numba.float64}
    types = (
        scalars.get(k) or numba.types.CPointer(numba.from_dtype(np.dtype(k))) for k in loop.kinds
    )
    signature = numba.types.void(*types)
    options = {"fastmath": set(loop.freedom)} if loop.freedom else {}
    made = numba.cfunc(signature, nopython=True, error_model="numpy", **options)(loop.function)
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
