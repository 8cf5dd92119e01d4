# SPDX-License-Identifier: Apache-2.0
"""The maps' contents as NumPy records, taken from the text of `ebpf/nicps_shared.h`.

That header is the one definition; nothing is written down a second time here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from nicps import bpf_sources

_NUMBER = {"__u8": "u1", "__u16": "u2", "__u32": "u4", "__u64": "u8"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Records by struct name without `nicps_`, limits by name without `NICPS_`, and the counters' names in order."""

    records: dict[str, np.dtype[np.void]]
    limits: dict[str, int]
    counters: tuple[str, ...]


def parse(text: str) -> Layout:
    """Take the definitions out of a C header that keeps to what `nicps_shared.h` promises."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    limits = {
        name: int(value, 0)
        for name, value in re.findall(
            r"^[ \t]*#define NICPS_(\w+)[ \t]+(\w+)[ \t]*$", text, re.MULTILINE
        )
    }
    records = {}
    for name, body in re.findall(r"struct nicps_(\w+) \{(.*?)\};", text, re.DOTALL):
        fields = []
        for kind, field, size in re.findall(r"(__u\d+) (\w+)(?:\[([^\]]+)\])?;", body):
            shape = (_size(size, limits),) if size else ()
            fields.append((field, np.dtype((f"={_NUMBER[kind]}", shape))))
        if len(fields) != body.count(";"):
            raise ValueError(f"struct nicps_{name} has fields that this does not understand")
        records[name] = np.dtype(fields, align=True)
    enum = re.search(r"enum nicps_count \{(.*?)\};", text, re.DOTALL)
    names = re.findall(r"NICPS_COUNT_(\w+),", enum[1]) if enum else []
    return Layout(records, limits, tuple(name.lower() for name in names))


def _size(text: str, limits: dict[str, int]) -> int:
    size = 1
    for sign, word in re.findall(r"([*/]?)\s*(\w+)", text):
        value = limits[word.removeprefix("NICPS_")] if word.startswith("NICPS_") else int(word)
        size = size // value if sign == "/" else size * value
    return size


@cache
def layout() -> Layout:
    """The layout of the sources that this installation has."""
    return parse(bpf_sources.path("nicps_shared.h").read_text())
