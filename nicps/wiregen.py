# SPDX-License-Identifier: Apache-2.0
"""Writes what others need of the wire definition: the C and P4 headers.

    python -m nicps.wiregen            # write the files
    python -m nicps.wiregen --check    # exit 1 and name each file that differs from `nicps.wire`

The files are committed, and CI runs the check. The output depends on `nicps/wire.py` only.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any, NamedTuple

from nicps import wire
from nicps.errors import EnvironmentProblem, NicpsError

ROOT = Path(__file__).resolve().parent.parent


class Constant(NamedTuple):
    """A number that all three languages know; `bits` is its width in P4."""

    name: str
    value: int
    bits: int
    doc: str

    @property
    def text(self) -> str:
        """The value as people write it: EtherTypes in hexadecimal."""
        return f"{self.value:#06x}" if self.name == "ETHERTYPE" else str(self.value)


class Values(NamedTuple):
    """An enumeration of the wire: prefix of its names, and the field of the wire that holds it."""

    prefix: str
    enum: type[IntEnum] | type[IntFlag]
    cls: type[Any]
    field: str

    @property
    def bits(self) -> int:
        """Width of the field on the wire."""
        layout = wire.Layout.of(self.cls)
        return layout.wires[layout.names.index(self.field)].size * 8


#: Every struct of the wire, in the order in which a reader meets them.
STRUCTS: tuple[type[Any], ...] = (
    wire.Header,
    wire.Fragment,
    wire.Token,
    wire.Entry,
    wire.Range,
    wire.Call,
    wire.Answer,
    wire.Formed,
    wire.FormedMember,
    wire.Decision,
    wire.Ack,
    wire.Want,
    wire.Fail,
)

ENUMS: tuple[Values, ...] = (
    Values("TYPE", wire.FrameType, wire.Header, "type"),
    Values("FLAG", wire.Flag, wire.Header, "flags"),
    Values("STATE", wire.TokenState, wire.Token, "state"),
    Values("MARK", wire.Mark, wire.Entry, "marks"),
    Values("PHASE", wire.PhaseKind, wire.Decision, "phase"),
)


def constants() -> tuple[Constant, ...]:
    """The numbers that C and P4 share with `nicps.wire`."""
    return (
        Constant("VERSION", wire.VERSION, 8, "first byte of every frame of ours"),
        Constant("ETHERTYPE", wire.ETHERTYPE, 16, "IEEE 802 local experimental; settable"),
        Constant("MAX_MEMBERS", wire.MAX_MEMBERS, 16, "members of a network"),
        Constant("PAYLOAD_BYTES", wire.PAYLOAD_BYTES, 16, "payload of a fragment"),
        Constant("BLOCK_LANES", wire.BLOCK_LANES, 16, "accumulators in a block of the map"),
        Constant("MAX_FRAME_BYTES", wire.MAX_FRAME_BYTES, 16, "longest frame, from version on"),
        Constant("NAME_BYTES", wire.NAME_BYTES, 16, "host name in a member list"),
        Constant("HEADER_BYTES", wire.HEADER_BYTES, 16, "header"),
        Constant("FRAGMENT_HEADER_BYTES", wire.FRAGMENT_HEADER_BYTES, 16, "header and fragment"),
        Constant("TOKEN_HEADER_BYTES", wire.TOKEN_HEADER_BYTES, 16, "header and token"),
        *(
            Constant(f"MAX_SHIFT_{width}", shift, 8, f"largest shift, lanes of {width} bits")
            if width
            else Constant("MAX_SHIFT_0", shift, 8, "shift of raw bytes")
            for width, shift in sorted(wire.MAX_SHIFT.items())
        ),
    )


def comments(cls: type[Any]) -> dict[str, str]:
    """The comments behind an enumeration's members in the source: member's name -> text."""
    found = re.finditer(r"^    ([A-Z_]+) = \d+(?:  # (.*))?$", inspect.getsource(cls), re.MULTILINE)
    return {match[1]: match[2] or "" for match in found}


def snake(cls: type[Any]) -> str:
    """`formed_member` for `FormedMember`: the name of a struct in C and P4."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def summary(cls: type[Any]) -> str:
    """First paragraph of a class's docstring, in one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


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
        " * The wire of nicps, for C. Generated from nicps/wire.py by `python -m nicps.wiregen`:",
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
        docs = comments(values.enum)
        lines += ["", f"/* {summary(values.enum)} */", f"enum nicps_{values.prefix.lower()} {{"]
        lines += _columns(
            [
                (f"NICPS_{values.prefix}_{m.name} = {m.value},", docs[str(m.name)])
                for m in values.enum
            ],
            "\t",
        )
        lines.append("};")
    for cls in STRUCTS:
        layout = wire.Layout.of(cls)
        lines += ["", f"/* {summary(cls)} */", f"struct nicps_{snake(cls)} {{"]
        lines += _columns(
            [
                (f"{w.c} {name}{f'[{w.size}]' if w.code.endswith('s') else ''};", w.doc)
                for name, w in zip(layout.names, layout.wires, strict=True)
            ],
            "\t",
        )
        name = f"struct nicps_{snake(cls)}"
        text = f"{name} has a hole"
        lines += ["};", f'_Static_assert(sizeof({name}) == {layout.struct.size}, "{text}");']
    lines += ["", "#endif /* NICPS_WIRE_H */"]
    return "\n".join(lines) + "\n"


def p4_header() -> str:
    """`p4/include/nicps_wire.p4`: headers, values and limits for P4-16."""
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "// The wire of nicps, for P4-16. Generated from nicps/wire.py by",
        "// `python -m nicps.wiregen`: change it there.",
        "#ifndef NICPS_WIRE_P4",
        "#define NICPS_WIRE_P4",
        "",
    ]
    lines += _columns(
        [
            (
                f"const bit<{c.bits}> NICPS_{c.name} = {c.text};",
                c.doc,
            )
            for c in constants()
        ],
        "",
    )
    for values in ENUMS:
        docs = comments(values.enum)
        lines += ["", f"// {summary(values.enum)}"]
        lines += _columns(
            [
                (
                    f"const bit<{values.bits}> NICPS_{values.prefix}_{m.name} = {m.value};",
                    docs[str(m.name)],
                )
                for m in values.enum
            ],
            "",
        )
    for cls in STRUCTS:
        layout = wire.Layout.of(cls)
        lines += ["", f"// {summary(cls)}", f"header nicps_{snake(cls)}_t {{"]
        lines += _columns(
            [
                (f"{'int' if w.code == 'b' else 'bit'}<{w.size * 8}> {name};", w.doc)
                for name, w in zip(layout.names, layout.wires, strict=True)
            ],
            "    ",
        )
        lines.append("}")
    lines += ["", "#endif  // NICPS_WIRE_P4"]
    return "\n".join(lines) + "\n"


#: Path from the checkout's root -> what it must hold.
OUTPUTS: dict[str, Callable[[], str]] = {
    "ebpf/include/nicps_wire.h": c_header,
    "p4/include/nicps_wire.p4": p4_header,
}


def drifted(root: Path = ROOT) -> list[str]:
    """The generated files under `root` that are missing or differ from the definition."""
    return [
        path
        for path, make in OUTPUTS.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != make()
    ]


def write(root: Path = ROOT) -> list[str]:
    """Write the files that differ; returns their paths.

    Raises:
        EnvironmentProblem: `root` is not a checkout of nicps, or cannot be written.
    """
    if not (root / "nicps" / "wire.py").is_file() or not (root / "pyproject.toml").is_file():
        raise EnvironmentProblem(f"{root} is not a checkout of nicps; name one with --root")
    changed = drifted(root)
    for path in changed:
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(OUTPUTS[path](), encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {root / path}: {error.strerror}") from error
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the generator; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nicps.wiregen", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail on any difference"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the checkout (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        if not options.check:
            for path in write(options.root):
                print(path)
            return 0
        stale = drifted(options.root)
        for path in stale:
            print(
                f"{path} differs from nicps/wire.py: run python -m nicps.wiregen", file=sys.stderr
            )
        return 1 if stale else 0
    except NicpsError as error:
        print(f"wiregen: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
