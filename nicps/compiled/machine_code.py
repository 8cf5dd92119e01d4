# SPDX-License-Identifier: Apache-2.0
"""Machine code that a child process has compiled: how it is kept, and called.

It is kept beside this file if the user may write there, else in the user's ~/.cache/nicps, else nowhere, without a
word. The home of a program that an agent has started is the job's folder, so only that job finds the code again. Users
share no folder on purpose: a user that writes to it could run code as the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_DIGEST_BYTES = 32
_OTHERS_WRITE = 0o022  # group, and everybody
#: Lines of /proc/cpuinfo.
_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "flags")


class MachineCode:
    """Code in memory, which is read and run only."""

    def __init__(self, code: bytes) -> None:
        file = os.memfd_create("nicps-code")
        with open(file, "wb") as written:
            written.write(code)
            written.flush()
            access = mmap.PROT_READ | mmap.PROT_EXEC
            self._memory = mmap.mmap(file, len(code), mmap.MAP_PRIVATE, access)
        self._base = np.frombuffer(self._memory, np.uint8).ctypes.data

    def function(self, at: int, kinds: Iterable[Any]) -> Callable[..., None]:
        """The C function there; its parameters are `int`, `float`, or of another kind, whose address it gets."""
        scalars = {int: ctypes.c_int64, float: ctypes.c_double}
        arguments: list[Any] = [scalars.get(kind, ctypes.c_void_p) for kind in kinds]
        call: Any = ctypes.CFUNCTYPE(None, *arguments)(self._base + at)
        call.code = self  # the code is there as long as the function is
        return call  # type: ignore[no-any-return]


def kept_or_made(name: str, basis: bytes, make: Callable[[], bytes]) -> bytes:
    """The code of that name that an earlier process has kept, if its basis, numba and the processor are the same.

    Otherwise what `make` makes, which is kept.

    Raises:
        ImportError: numba is not installed.
        OSError: the processor is no x86-64.
        Exception: whatever `make` raises.
    """
    identity = _identity(basis)
    paths = [folder / f"{name}.bin" for folder in _folders()]
    for path in paths:
        code = _read(path, identity)
        if code is not None:
            return code
    code = make()
    for path in paths:
        with contextlib.suppress(OSError):
            _write(path, _digest(identity, code) + code)
            break
    return code


def _identity(basis: bytes) -> bytes:
    """Of all that the code depends on."""
    if platform.machine() != "x86_64":
        raise OSError(f"nicps.compiled.elf links for x86-64, and this is {platform.machine()}")
    found = hashlib.sha256(basis)
    for package in ("numba", "llvmlite"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ImportError(f"{package} is not installed")
        status = os.stat(spec.origin)
        found.update(f"{spec.origin} {status.st_mtime_ns} {status.st_size}\n".encode())
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    found.update("\n".join(x for x in first.splitlines() if x.startswith(_PROCESSOR)).encode())
    return found.digest()


def _digest(identity: bytes, code: bytes) -> bytes:
    return hashlib.sha256(identity + code).digest()


def _folders() -> Iterator[Path]:
    """Where code is kept; the first that can be written to."""
    yield Path(importlib.util.cache_from_source(__file__)).parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if cache.is_absolute():
        yield cache / "nicps"


def _read(path: Path, identity: bytes) -> bytes | None:
    """The code in a file; None: there is none, or another one, or another user may have written it."""
    owners = os.geteuid(), os.stat(__file__).st_uid
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in owners or status.st_mode & _OTHERS_WRITE:
                return None
            kept = file.read()
    except OSError:
        return None
    code = kept[_DIGEST_BYTES:]
    return code if kept[:_DIGEST_BYTES] == _digest(identity, code) else None


def _write(path: Path, content: bytes) -> None:
    """The whole file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=f"{path.name}.", dir=path.parent, delete=False) as file:
        part = Path(file.name)
        try:
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink()
            raise
