# SPDX-License-Identifier: Apache-2.0
"""Where the BPF sources are: in a checkout, or packed into the wheel."""

from __future__ import annotations

import re
from pathlib import Path

from nicps.errors import EnvironmentProblem

_PACKAGE = Path(__file__).resolve().parent


def folder() -> Path:
    """The folder of the BPF sources: the checkout's `ebpf/`, else the packaged copy `nicps/_ebpf`.

    Raises:
        EnvironmentProblem: neither is there.
    """
    for candidate in (_PACKAGE.parent / "ebpf", _PACKAGE / "_ebpf"):
        if (candidate / "include" / "nicps_wire.h").is_file():
            return candidate
    raise EnvironmentProblem(f"the BPF sources are not beside {_PACKAGE}: install nicps again")


def path(name: str) -> Path:
    """Path of one source, for example `nicps.c`.

    Raises:
        EnvironmentProblem: it is not there.
    """
    found = folder() / name
    if not found.is_file():
        raise EnvironmentProblem(f"the BPF source {found} is not there: install nicps again")
    return found


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


def flatten(source: Path) -> str:
    """The source with its own headers (`#include "..."`) put in place, as one text.

    BCC makes map look-ups into calls only in the file that it is given, not in headers. `#line` keeps the
    compiler's messages about the files that people edit.

    Raises:
        EnvironmentProblem: a header is not there.
    """
    return _flatten(source, {})


def _flatten(source: Path, done: dict[Path, str]) -> str:
    """`done`: what each file has become. Many are included by many others."""
    if source in done:
        return done[source]
    lines = [f'#line 1 "{source.name}"']
    for number, line in enumerate(source.read_text().splitlines(), 1):
        include = _INCLUDE.match(line) if "include" in line else None
        if include is None:
            lines.append(line)
            continue
        found = [f for f in (source.parent / include[1], folder() / include[1]) if f.is_file()]
        if not found:
            raise EnvironmentProblem(
                f"{source}:{number}: {include[1]} is not there: install nicps again"
            )
        lines += [_flatten(found[0], done), f'#line {number + 1} "{source.name}"']
    done[source] = "\n".join(lines) + "\n"
    return done[source]
