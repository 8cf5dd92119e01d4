# SPDX-License-Identifier: Apache-2.0
"""Writes what is made of definitions: the C and P4 headers, docs/wire.md, and the tables of docs/socket.md.

    python -m nicps.wiregen            # write the files
    python -m nicps.wiregen --check    # exit 1 and name each file that differs

The files are committed, and CI runs the check. The frames are defined in `nicps/wire/`, the messages of the agent's
socket in `messages.py`, `events.py` and `json_form.py` of `nicps/session/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nicps import messagetable
from nicps.errors import EnvironmentProblem, NicpsError
from nicps.wiretable import (
    ENUMS,
    STRUCTS,
    comments,
    constants,
    fields_of,
    markdown,
    size_of,
    snake,
    summary,
)

ROOT = Path(__file__).resolve().parent.parent


def _columns(rows: Sequence[tuple[str, str]], indent: str) -> list[str]:
    """Lines of code, each with its comment, the comments aligned."""
    width = max(len(code) for code, _ in rows)
    return [
        f"{indent}{code:{width}} /* {doc} */" if doc else f"{indent}{code}" for code, doc in rows
    ]


def c_header() -> str:
    """`ebpf/include/nicps_wire.h`: structs, values and limits for C."""
    lines = [
        "/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */",
        "/*",
        " * The wire of nicps, for C. Generated from nicps/wire by `python -m nicps.wiregen`:",
        " * change it there. Read by the XDP and TC programs, and by any C program in user space.",
        " * The EtherType can be set from the compiler's command line.",
        " */",
        "/* clang-format off */",
        "#ifndef NICPS_WIRE_H",
        "#define NICPS_WIRE_H",
        "",
        "#include <linux/types.h>",
        "",
    ]
    defines = [(f"#define NICPS_{c.name} {c.text}", c.doc) for c in constants()]
    settable, *fixed = sorted(defines, key=lambda row: "NICPS_ETHERTYPE" not in row[0])
    lines += ["#ifndef NICPS_ETHERTYPE", *_columns([settable], ""), "#endif", ""]
    lines += _columns(fixed, "")
    for values in ENUMS:
        docs, prefix = comments(values.enum), f"NICPS_{values.prefix}"
        lines += ["", f"/* {summary(values.enum)} */", f"enum {prefix.lower()} {{"]
        lines += _columns(
            [(f"{prefix}_{m.name} = {m.value},", docs[str(m.name)]) for m in values.enum], "\t"
        )
        lines.append("};")
    for cls in STRUCTS:
        name = f"struct nicps_{snake(cls)}"
        lines += ["", f"/* {summary(cls)} */", f"{name} {{"]
        rows = []
        for field in fields_of(cls):
            array = f"[{field.bytes}]" if field.type == "bytes" else ""
            rows.append((f"{field.wire.c} {field.name}{array};", field.doc))
        lines += _columns(rows, "\t")
        lines.append("};")
        lines.append(f'_Static_assert(sizeof({name}) == {size_of(cls)}, "{name} has a hole");')
    lines += ["", "#endif /* NICPS_WIRE_H */"]
    return "\n".join(lines) + "\n"


def p4_header() -> str:
    """`p4/include/nicps_wire.p4`: headers, values and limits for P4-16."""
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "// The wire of nicps, for P4-16. Generated from nicps/wire by",
        "// `python -m nicps.wiregen`: change it there.",
        "#ifndef NICPS_WIRE_P4",
        "#define NICPS_WIRE_P4",
        "",
    ]
    lines += _columns(
        [(f"const bit<{c.bits}> NICPS_{c.name} = {c.text};", c.doc) for c in constants()], ""
    )
    for values in ENUMS:
        docs, prefix = comments(values.enum), f"const bit<{values.bits}> NICPS_{values.prefix}"
        lines += ["", f"// {summary(values.enum)}"]
        lines += _columns(
            [(f"{prefix}_{m.name} = {m.value};", docs[str(m.name)]) for m in values.enum], ""
        )
    for cls in STRUCTS:
        lines += ["", f"// {summary(cls)}", f"header nicps_{snake(cls)}_t {{"]
        rows = []
        for field in fields_of(cls):
            kind = "int" if field.type.startswith("i") else "bit"
            rows.append((f"{kind}<{field.bytes * 8}> {field.name};", field.doc))
        lines += _columns(rows, "    ")
        lines.append("}")
    lines += ["", "#endif  // NICPS_WIRE_P4"]
    return "\n".join(lines) + "\n"


#: Path from the checkout's root -> what it must hold, made of what it holds.
OUTPUTS: dict[str, Callable[[str], str]] = {
    "ebpf/include/nicps_wire.h": lambda _: c_header(),
    "p4/include/nicps_wire.p4": lambda _: p4_header(),
    "docs/wire.md": lambda _: markdown(),
    "docs/socket.md": messagetable.fill,
}


def _held(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def drifted(root: Path = ROOT) -> list[str]:
    """The generated files under `root` that are missing or differ from their definitions.

    Raises:
        EnvironmentProblem: docs/socket.md lacks the place of a table.
    """
    return [
        path
        for path, make in OUTPUTS.items()
        if (held := _held(root / path)) != make(held) or not held
    ]


def write(root: Path = ROOT) -> list[str]:
    """Write the files that differ; returns their paths.

    Raises:
        EnvironmentProblem: `root` is not a checkout of nicps, or cannot be written.
    """
    if not (root / "pyproject.toml").is_file():
        raise EnvironmentProblem(f"{root} is not a checkout of nicps; name one with --root")
    changed = drifted(root)
    for path in changed:
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(OUTPUTS[path](_held(root / path)), encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {root / path}: {error.strerror}") from error
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the generator; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nicps.wiregen",
        description="Write the C and P4 headers, docs/wire.md and the tables of docs/socket.md.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to write into")
    options = parser.parse_args(argv)
    try:
        if not options.check:
            for path in write(options.root):
                print(path)
            return 0
        stale = drifted(options.root)
        for path in stale:
            print(
                f"{path} differs from its definition: run python -m nicps.wiregen", file=sys.stderr
            )
        return 1 if stale else 0
    except NicpsError as error:
        print(f"wiregen: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
