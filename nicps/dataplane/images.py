# SPDX-License-Identifier: Apache-2.0
"""What BCC has compiled, kept until the machine starts again: to load it once more takes no compiler.

BCC compiles whenever it loads. An image is what came of it: the shapes of the maps, and the instructions, where a
map's place in the list stands instead of its descriptor (BPF_PSEUDO_MAP_FD, in the kernel's linux/bpf.h).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nicps.dataplane import bpf, headers

#: Root's, like the headers beside it.
FOLDER = headers.CACHE / "images"

_INSTRUCTION = np.dtype([("code", "u1"), ("registers", "u1"), ("offset", "=i2"), ("value", "=i4")])
_LOAD_64 = 0x18  # BPF_LD | BPF_IMM | BPF_DW
_MAP_DESCRIPTOR = 1  # BPF_PSEUDO_MAP_FD, as its source register
_SOURCE_SHIFT = 4 if sys.byteorder == "little" else 0
_NESTED = re.compile(r'BPF_ARRAY_OF_MAPS\((\w+), "(\w+)"')


def place(request: Mapping[str, Any], kernel_source: Path | None) -> Path:
    """Where the image of that request is, if there is one."""
    words = orjson.dumps(
        [list(os.uname()), str(kernel_source), request], option=orjson.OPT_SORT_KEYS
    )
    return FOLDER / hashlib.sha256(words).hexdigest()[:32]


def keep(path: Path, text: str, programs: Mapping[str, bytes], maps: Mapping[str, int]) -> None:
    """Write an image.

    Args:
        text: the source. It says which maps hold maps; the kernel does not.
        programs: by name, the instructions as they were loaded.
        maps: by name, the descriptors in these instructions.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    nested = dict(_NESTED.findall(text))
    names = sorted(maps, key=lambda name: name in nested)  # what others are made of comes first
    shapes = {}
    for name in names:
        info = bpf.map_info(maps[name])
        shape = (info.kind, info.key, info.value, info.entries, info.flags)
        shapes[name] = (*shape, nested.get(name))
    codes = {
        name: base64.b64encode(_exchanged(code, {maps[n]: at for at, n in enumerate(names)}))
        for name, code in programs.items()
    }
    image = {"maps": shapes, "programs": {name: code.decode() for name, code in codes.items()}}
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:
        try:
            aside.write(orjson.dumps(image))
            aside.flush()
            os.rename(aside.name, path)  # another process never sees half of it
        except BaseException:
            os.unlink(aside.name)
            raise


def load(path: Path, kinds: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """Load an image: descriptors of its programs and of its maps, by name; the caller owns them.

    Args:
        kinds: what is to be loaded, and as what (`bpf.PROGRAM_TYPES`).

    Raises:
        OSError: there is no image, or the kernel refuses it.
        LookupError, ValueError: it is damaged.
    """
    image = orjson.loads(path.read_bytes())
    programs: dict[str, int] = {}
    maps: dict[str, int] = {}
    with contextlib.ExitStack() as made:
        for name, (kind, key, value, entries, flags, inner) in image["maps"].items():
            like = maps[inner] if inner else 0
            maps[name] = bpf.map_create(name, kind, key, value, entries, flags, like)
            made.callback(os.close, maps[name])
        descriptors = dict(enumerate(maps.values()))
        for name, kind_of in kinds.items():
            code = _exchanged(base64.b64decode(image["programs"][name]), descriptors)
            programs[name] = bpf.program_load(bpf.PROGRAM_TYPES[kind_of], code, 0, name)
            made.callback(os.close, programs[name])
        made.pop_all()
    return programs, maps


def _exchanged(code: bytes, values: Mapping[int, int]) -> bytes:
    """The instructions, with other values where they name a map."""
    instructions = np.frombuffer(code, _INSTRUCTION).copy()
    source = instructions["registers"] >> _SOURCE_SHIFT & 15
    names_map = (instructions["code"] == _LOAD_64) & (source == _MAP_DESCRIPTOR)
    instructions["value"][names_map] = [values[int(v)] for v in instructions["value"][names_map]]
    return instructions.tobytes()
