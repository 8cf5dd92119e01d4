# SPDX-License-Identifier: Apache-2.0
"""Where the BPF sources are: in a checkout, or packed into the wheel."""

from __future__ import annotations

from pathlib import Path

from nicps.errors import EnvironmentProblem

_PACKAGE = Path(__file__).resolve().parent.parent


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
