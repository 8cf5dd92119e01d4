# SPDX-License-Identifier: Apache-2.0
"""Object files are linked and run without a linker; what a process has compiled is kept for the next one."""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path

import numpy as np
import pytest

from nicps.compiled import elf, machine_code
from nicps.compiled.machine_code import MachineCode, kept_or_made

llvm = pytest.importorskip("llvmlite.binding")

#: Two tables with an alignment each, of which a function copies a number, through another function.
TABLES = """
@small = internal constant [4 x i32] [i32 2, i32 3, i32 5, i32 7], align 4
@large = internal constant [16 x i32] [i32 11, i32 13, i32 17, i32 19, i32 23, i32 29, i32 31, i32 37,
    i32 41, i32 43, i32 47, i32 53, i32 59, i32 61, i32 67, i32 71], align 64
define internal void @put(i32* %to, i32* %table, i64 %at) noinline {
    %from = getelementptr i32, i32* %table, i64 %at
    %value = load i32, i32* %from
    store i32 %value, i32* %to
    ret void
}
define void @copy(i32* %to, i64 %at) {
    %first = getelementptr [4 x i32], [4 x i32]* @small, i64 0, i64 0
    %second = getelementptr [16 x i32], [16 x i32]* @large, i64 0, i64 0
    call void @put(i32* %to, i32* %first, i64 %at)
    %next = getelementptr i32, i32* %to, i64 1
    call void @put(i32* %next, i32* %second, i64 %at)
    ret void
}
"""
NEEDS_ANOTHER = "declare void @other()\ndefine void @f() {\n call void @other()\n ret void\n}\n"
WRITES = (
    "@kept = internal global i32 1\ndefine void @f() {\n store i32 2, i32* @kept\n ret void\n}\n"
)
TWO = "define void @f() {\n ret void\n}\ndefine void @g() {\n ret void\n}\n"


def object_file(assembly: str) -> bytes:
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(reloc="pic", codemodel="small")
    made: bytes = machine.emit_object(llvm.parse_assembly(assembly))
    return made


@pytest.fixture(scope="module", autouse=True)
def targets() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@pytest.mark.parametrize("before", [0, 64, 4096])
def test_code_runs_wherever_it_is_put(before: int) -> None:
    linked, entry = elf.link(object_file(TABLES))
    assert len(linked) % 64 == 0
    copy = MachineCode(bytes(before) + linked).function(before + entry, (np.int32, int))
    for at in range(4):
        found = np.zeros(2, np.int32)
        copy(found.ctypes.data, at)
        assert found.tolist() == [(2, 3, 5, 7)[at], (11, 13, 17, 19)[at]]


@pytest.mark.parametrize("assembly", [NEEDS_ANOTHER, WRITES, TWO])
def test_what_cannot_be_linked_is_refused(assembly: str) -> None:
    with pytest.raises(ValueError, match=r"relocation|can be written|global functions"):
        elf.link(object_file(assembly))


def test_relocations_of_an_unknown_form_are_refused() -> None:
    """None of them may be left out."""
    file = bytearray(object_file(TABLES))
    sections, count = struct.unpack_from("<Q", file, 40)[0], struct.unpack_from("<H", file, 60)[0]
    for kind in range(sections + 4, sections + 64 * count, 64):
        if struct.unpack_from("<I", file, kind) == (4,):  # with addends
            struct.pack_into("<I", file, kind, 9)  # without
    with pytest.raises(ValueError, match="relocations of kind 0x9"):
        elf.link(bytes(file))


def test_code_of_another_processor_is_refused() -> None:
    file = bytearray(object_file(TABLES))
    file[18] = 183  # AArch64
    with pytest.raises(ValueError, match="machine 183"):
        elf.link(bytes(file))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders where code is kept. The first cannot be made."""
    (tmp_path / "file").touch()
    found = [tmp_path / "file" / "below", tmp_path / "second", tmp_path / "third"]
    monkeypatch.setattr(machine_code, "_folders", lambda: iter(found))
    return found


def ask(code: bytes, basis: bytes = b"basis") -> tuple[bytes, bool]:
    """What is there under that name, and whether it had to be made, as this code."""
    made = []

    def make() -> bytes:
        made.append(True)
        return code

    return kept_or_made("name", basis, make), bool(made)


def test_code_is_kept_in_the_first_folder_that_can_be_written_to(folders: list[Path]) -> None:
    assert ask(b"first") == (b"first", True)
    assert ask(b"second") == (b"first", False)
    assert [p.name for p in folders[1].iterdir()] == ["name.bin"] and not folders[2].exists()
    folders[1].rename(folders[2])
    assert ask(b"second") == (b"first", False)


def test_code_of_another_basis_is_not_taken(folders: list[Path]) -> None:
    ask(b"first")
    assert ask(b"second", b"another") == (b"second", True)
    assert ask(b"third", b"another") == (b"second", False)


def test_a_file_that_was_not_written_whole_is_not_taken(folders: list[Path]) -> None:
    ask(b"first")
    path = folders[1] / "name.bin"
    for content in (b"", path.read_bytes()[:-1], path.read_bytes() + b"x"):
        path.write_bytes(content)
        assert ask(b"second") == (b"second", True)


def test_a_file_that_others_may_write_to_is_not_taken(folders: list[Path]) -> None:
    ask(b"first")
    (folders[1] / "name.bin").chmod(0o664)
    assert ask(b"second") == (b"second", True)
    assert (folders[1] / "name.bin").stat().st_mode & 0o022 == 0
    assert ask(b"third") == (b"second", False)


def test_a_file_of_another_user_is_not_taken(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(b"first")
    others, status = os.geteuid() + 1, os.fstat

    class Status:
        st_uid = others

    monkeypatch.setattr(machine_code.os, "fstat", lambda _: Status())
    assert ask(b"second") == (b"second", True)
    monkeypatch.setattr(machine_code.os, "fstat", status)
    assert ask(b"third") == (b"second", False)


def test_code_is_made_again_without_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_folders", lambda: iter(()))
    assert ask(b"first") == (b"first", True)
    assert ask(b"second") == (b"second", True)


def test_nothing_is_made_for_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(OSError, match="aarch64"):
        ask(b"code")
