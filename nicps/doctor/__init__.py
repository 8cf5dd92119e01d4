# SPDX-License-Identifier: Apache-2.0
"""The checks of `nicps doctor`, one function each; each returns a row and raises nothing.

Imports a package only after a check has found it.
"""

from __future__ import annotations

import os
from pathlib import Path

from nicps.doctor.access import check_access
from nicps.doctor.check import Check, State, fail, ok, warn
from nicps.doctor.host import (
    check_bcc,
    check_btf,
    check_jit,
    check_kernel,
    check_lockdown,
    check_memory,
    check_packages,
    check_privileges,
    check_training,
)
from nicps.errors import NicpsError

__all__ = [
    "Check",
    "State",
    "check_headers",
    "check_key",
    "check_sources",
    "examine",
    "table",
    "worst",
]


def check_headers() -> Check:
    """Kernel headers for BCC's compiler; any recent ones serve."""
    from nicps.dataplane import headers

    try:
        return ok("headers", headers.find().description)
    except NicpsError as error:
        text, _, mend = str(error).partition("; run: ")
        return fail("headers", text, mend or headers.install_command())


def check_sources() -> Check:
    """The BPF programs' sources: the checkout's, or the wheel's."""
    from nicps import bpf_sources

    try:
        return ok("BPF sources", str(bpf_sources.folder()))
    except NicpsError as error:
        return fail("BPF sources", str(error), "install nicps again")


def check_key(path: Path) -> Check:
    """The network's key, as `nicps join --key` reads it."""
    from nicps.auth import NetworkKey

    if os.geteuid() != 0 and path.exists() and not os.access(path, os.R_OK):
        return warn("key", f"{path}: only root can look at it", "run this with sudo")
    try:
        NetworkKey.read(path)
    except NicpsError as error:
        text, separator, mend = str(error).partition("; ")
        if not separator:
            text, _, mend = str(error).rpartition(": ")
        return fail("key", text, mend)
    return ok("key", str(path))


def examine(
    iface: str | None = None,
    user: str = "nobody",
    job: Path | None = None,
    data: Path | None = None,
    key: Path | None = None,
) -> list[Check]:
    """All rows for this host, in the order in which to repair them.

    The interface's rows attach a program for a moment if there is none; with a key also one that signs nothing.
    """
    packages = check_packages()
    rows = [
        check_kernel(),
        check_btf(),
        check_jit(),
        check_lockdown(),
        check_privileges(),
        check_memory(),
        packages,
        check_training(),
        check_bcc(),
    ]
    if packages.state != "fail":  # the further checks import some of them
        from nicps.doctor.interface import check_interface

        rows += [check_headers(), check_sources(), *check_interface(iface, key is not None)]
    if key is not None:
        rows.append(check_key(key))
    return rows + check_access(user, job, data)


def worst(rows: list[Check]) -> State:
    """The worst state among the rows."""
    states = {row.state for row in rows}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def table(rows: list[Check]) -> str:
    """The rows as aligned text; the advice stands below its row."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.state:<4}  {row.name:<{width}}  {row.found}")
        if row.mend:
            lines.append(f"{'':<4}  {'':<{width}}  -> {row.mend}")
    return "\n".join(lines)
