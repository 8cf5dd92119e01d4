# SPDX-License-Identifier: Apache-2.0
"""What is generated of the wire: no drift, the same sizes and offsets in C, CI's check."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nicps import wire, wiregen
from nicps.wiretable import ENUMS, STRUCTS, constants, fields_of, size_of, snake

pytestmark = pytest.mark.unit


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with nothing but what the generator looks at."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "docs").mkdir()
    shutil.copy(wiregen.ROOT / "docs/socket.md", tmp_path / "docs")
    wiregen.write(tmp_path)
    return tmp_path


def test_committed_files_are_up_to_date() -> None:
    assert wiregen.drifted() == []
    assert wiregen.main(["--check"]) == 0


def test_check_names_the_drifted_file(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wiregen.main(["--check", "--root", str(copy)]) == 0
    header = copy / "ebpf/include/nicps_wire.h"
    header.write_text(header.read_text("utf-8") + "\n", "utf-8")
    (copy / "p4/include/nicps_wire.p4").unlink()
    page = copy / "docs/socket.md"
    page.write_text(page.read_text("utf-8").replace("| a path |", "| a text |"), "utf-8")
    assert wiregen.main(["--check", "--root", str(copy)]) == 1
    said = capsys.readouterr().err
    assert "ebpf/include/nicps_wire.h differs" in said
    assert "p4/include/nicps_wire.p4 differs" in said
    assert "docs/socket.md differs" in said
    assert "wire.md" not in said
    assert wiregen.main(["--root", str(copy)]) == 0
    assert wiregen.main(["--check", "--root", str(copy)]) == 0


def test_elsewhere_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wiregen.main(["--root", str(tmp_path)]) == 3
    assert "not a checkout" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_table_that_has_no_place_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = copy / "docs/socket.md"
    page.write_text(page.read_text("utf-8").replace("<!-- table: events -->", ""), "utf-8")
    assert wiregen.main(["--root", str(copy)]) == 3
    assert "docs/socket.md has tables commands, ends, " in capsys.readouterr().err


def test_c_compiler_agrees(tmp_path: Path) -> None:
    """Sizes, offsets and values as the C compiler sees them."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        # The header's own assertions are checked whenever BCC compiles the programs.
        assert wiregen.c_header().count("_Static_assert") == len(STRUCTS)
        return
    lines = ["#include <stddef.h>", '#include "nicps_wire.h"']
    for cls in STRUCTS:
        name = f"struct nicps_{snake(cls)}"
        lines.append(f'_Static_assert(sizeof({name}) == {size_of(cls)}, "size");')
        for field in fields_of(cls):
            at = f"offsetof({name}, {field.name}) == {field.offset}"
            size = f"sizeof((({name} *)0)->{field.name}) == {field.bytes}"
            lines.append(f'_Static_assert({at} && {size}, "{name}.{field.name}");')
    for c in constants():
        lines.append(f'_Static_assert(NICPS_{c.name} == {c.value}, "{c.name}");')
    for v in ENUMS:
        lines += [
            f'_Static_assert(NICPS_{v.prefix}_{m.name} == {m.value}, "{m.name}");' for m in v.enum
        ]
    source = tmp_path / "check.c"
    source.write_text("\n".join(lines) + "\n")
    include = wiregen.ROOT / "ebpf/include"
    command = [compiler, "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", f"-I{include}", source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_p4_headers_have_the_same_fields_and_bits() -> None:
    text = wiregen.p4_header()
    for cls in STRUCTS:
        body = re.search(rf"header nicps_{snake(cls)}_t \{{\n(.*?)\n\}}", text, re.DOTALL)
        assert body is not None
        found = re.findall(r"^    (bit|int)<(\d+)> (\w+);", body[1], re.MULTILINE)
        assert [(name, int(bits)) for _, bits, name in found] == [
            (f.name, f.bytes * 8) for f in fields_of(cls)
        ]
        assert [kind for kind, _, _ in found] == [
            "int" if f.type.startswith("i") else "bit" for f in fields_of(cls)
        ]
    for constant in constants():
        assert f"const bit<{constant.bits}> NICPS_{constant.name} = {constant.text};" in text
        assert constant.value < 2**constant.bits


def test_every_struct_and_value_of_the_definition_is_listed() -> None:
    bodies = {body for body, _ in wire.FORMATS.values()}
    items = {cls for _, groups in wire.FORMATS.values() for cls, _ in groups}
    sealed = {wire.Grant, wire.GrantMember}  # in the tail of a GRANT
    assert set(STRUCTS) == bodies | items | sealed | {wire.Header}
    assert all(values.bits in (8, 16) for values in ENUMS)


def test_no_size_of_the_wire_is_written_by_hand_in_p4() -> None:
    """Whatever is added to, taken from or multiplied by anything has a name; but 1 is no size."""
    sources = sorted((wiregen.ROOT / "p4").rglob("*.p4"))
    assert sources
    for source in sources:
        code = re.sub(r"//.*|/\*.*?\*/", "", source.read_text("utf-8"))
        numbers = re.findall(r"[-+*]\s*(\d+)\b", code) + re.findall(r"\b(\d+)\s*[-+*]", code)
        assert not set(numbers) - {"1"}, source.name
