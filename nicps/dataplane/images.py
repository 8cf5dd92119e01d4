# SPDX-License-Identifier: Apache-2.0
"""Programs that BCC has compiled, kept until the machine starts again: loading them again needs no compiler.

BCC compiles whenever it loads. An image is the result: the shapes of the maps, and the instructions, in which a map's
place in the list stands instead of its descriptor (BPF_PSEUDO_MAP_FD, in the kernel's linux/bpf.h).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nicps.dataplane import bpf, headers
from nicps.errors import BpfLoadError

#: Root's, like the headers beside it.
FOLDER = headers.CACHE / "images"

_INSTRUCTION = np.dtype([("code", "u1"), ("registers", "u1"), ("offset", "=i2"), ("value", "=i4")])
_LOAD_64 = 0x18  # BPF_LD | BPF_IMM | BPF_DW
_MAP_DESCRIPTOR = 1  # BPF_PSEUDO_MAP_FD, as its source register
_SOURCE_SHIFT = 4 if sys.byteorder == "little" else 0
_DEVMAPS = (14, 25)  # BPF_MAP_TYPE_DEVMAP, BPF_MAP_TYPE_DEVMAP_HASH
_PROGRAMS_ONLY_READ = (
    1 << 7
)  # BPF_F_RDONLY_PROG: the kernel sets it on a devmap, and refuses it from others
_NESTED = re.compile(r'BPF_ARRAY_OF_MAPS\((\w+), "(\w+)"')


def place(request: Mapping[str, Any], kernel_source: Path | None) -> Path:
    """The path of the image for that request, if there is one."""
    words = orjson.dumps(
        [list(os.uname()), str(kernel_source), request], option=orjson.OPT_SORT_KEYS
    )
    return FOLDER / hashlib.sha256(words).hexdigest()[:32]


def make(text: str, programs: Mapping[str, bytes], maps: Mapping[str, int]) -> bytes:
    """Make an image.

    Args:
        text: the source. It says which maps hold maps; the kernel does not report this.
        programs: by name, the instructions that name the maps by their descriptors.
        maps: by name, these descriptors.
    """
    nested = dict(_NESTED.findall(text))
    names = sorted(maps, key=lambda name: name in nested)  # maps that others refer to come first
    shapes = {}
    for name in names:
        info = bpf.map_info(maps[name])
        flags = info.flags & ~(_PROGRAMS_ONLY_READ if info.kind in _DEVMAPS else 0)
        shape = (info.kind, info.key, info.value, info.entries, flags)
        shapes[name] = (*shape, nested.get(name))
    codes = {
        name: base64.b64encode(_exchanged(code, {maps[n]: at for at, n in enumerate(names)}))
        for name, code in programs.items()
    }
    return orjson.dumps(
        {"maps": shapes, "programs": {name: code.decode() for name, code in codes.items()}}
    )


def keep(path: Path, image: bytes) -> None:
    """Write an image.

    Raises:
        OSError: it cannot be written; no part of it is left.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:
        try:
            aside.write(image)
            aside.flush()
            os.rename(aside.name, path)  # another process never sees a part of it
        except BaseException:
            os.unlink(aside.name)
            raise


def load(
    data: bytes,
    kinds: Mapping[str, str],
    later: Iterable[str] = (),
    shared: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], dict[str, int], dict[str, bytes]]:
    """Load an image: descriptors of its programs and of its maps, by name; the caller owns them.

    Args:
        kinds: the programs to be loaded, and their types (`bpf.PROGRAM_TYPES`).
        later: programs whose instructions for these maps are returned, by name, as the third result.
        shared: maps that exist already, by name. They are used, and are not among those that are returned.

    Raises:
        OSError: the kernel refuses it.
        BpfLoadError: a shared map is not of the kind that the image has been compiled for.
        LookupError, ValueError: it is damaged.
    """
    image = orjson.loads(data)
    programs: dict[str, int] = {}
    maps: dict[str, int] = {}
    every = dict(shared or {})
    with contextlib.ExitStack() as made:
        for name, (kind, key, value, entries, flags, inner) in image["maps"].items():
            if name in every:
                _check_shape(name, every[name], (kind, key, value))
                continue
            like = every[inner] if inner else 0
            maps[name] = every[name] = bpf.map_create(name, kind, key, value, entries, flags, like)
            made.callback(os.close, maps[name])
        codes = _codes(image, [*kinds, *later], every)
        for name, kind_of in kinds.items():
            programs[name] = bpf.program_load(bpf.PROGRAM_TYPES[kind_of], codes.pop(name), 0, name)
            made.callback(os.close, programs[name])
        made.pop_all()
    return programs, maps, codes


def _check_shape(name: str, fd: int, shape: tuple[int, int, int]) -> None:
    info = bpf.map_info(fd)
    if (info.kind, info.key, info.value) != shape:
        raise BpfLoadError(
            f"the map {name} has another shape than in the sources: nicps was installed anew since this process began:"
            " start it again"
        )


def codes(data: bytes, names: Iterable[str], maps: Mapping[str, int]) -> dict[str, bytes]:
    """The instructions of these programs in an image, by name, for the descriptors of those maps.

    Raises:
        LookupError, ValueError: it is damaged.
    """
    return _codes(orjson.loads(data), names, maps)


def _codes(image: Any, names: Iterable[str], maps: Mapping[str, int]) -> dict[str, bytes]:
    descriptors = {at: maps[name] for at, name in enumerate(image["maps"])}
    stored = image["programs"]
    return {name: _exchanged(base64.b64decode(stored[name]), descriptors) for name in names}


def _exchanged(code: bytes, values: Mapping[int, int]) -> bytes:
    """The instructions, with other values in those that name a map."""
    instructions = np.frombuffer(code, _INSTRUCTION).copy()
    source = instructions["registers"] >> _SOURCE_SHIFT & 15
    names_map = (instructions["code"] == _LOAD_64) & (source == _MAP_DESCRIPTOR)
    instructions["value"][names_map] = [values[int(v)] for v in instructions["value"][names_map]]
    return instructions.tobytes()
