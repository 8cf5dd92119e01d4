# SPDX-License-Identifier: Apache-2.0
"""Machine code out of an object file, as the System V ABI for x86-64 has it: code and constants in one piece that runs
wherever it is put.

That is what a linker does, for the few kinds of sections and relocations that loops over numbers have. Hosts need no
linker.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, the lowest byte first
_X86_64 = 62
_PROGBITS, _SYMTAB, _RELA, _REL, _CREL = 1, 2, 4, 9, 0x40000014  # kinds of sections
_WRITE, _ALLOC = 1, 2  # flags of them
_GLOBAL_FUNCTION = 0x12
_RELATIVE = (2, 4)  # R_X86_64_PC32, and R_X86_64_PLT32 of a symbol in the same piece
_LEAST_ALIGNMENT = 64  # of the widest vector's constants

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


_SECTION = struct.Struct("<IIQQQQIIQQ")


def link(file: bytes) -> tuple[bytes, int]:
    """The code, a multiple of 64 bytes that must be put at such a multiple, and where its one global function begins.

    Raises:
        ValueError: the file is for another processor; or its code needs something that is not in it, or can be written.
    """
    header = _HEADER.unpack_from(file)
    machine, offset, count = header[2], header[6], header[12]
    if not header[0].startswith(_MAGIC) or machine != _X86_64:
        raise ValueError(f"the object file is for machine {machine}, not for x86-64")
    sections = [_Section(*_SECTION.unpack_from(file, offset + 64 * i)) for i in range(count)]
    code, places = _place(file, sections)
    symbols = [
        symbol
        for section in sections
        if section.kind == _SYMTAB
        for symbol in _SYMBOL.iter_unpack(_content(file, section))
    ]
    for section in sections:
        if section.kind in (_REL, _CREL) and section.info in places:
            raise ValueError(f"relocations of kind {section.kind:#x} of section {section.info}")
        if section.kind == _RELA and section.info in places:
            for where, info, addend in _RELOCATION.iter_unpack(_content(file, section)):
                kind, (_, _, _, home, value, _) = info & 0xFFFFFFFF, symbols[info >> 32]
                if kind not in _RELATIVE or home not in places:
                    raise ValueError(f"relocation {kind} of a symbol in section {home}")
                at = places[section.info] + where
                struct.pack_into("<i", code, at, places[home] + value + addend - at)
    entries = [
        places[home] + value for _, info, _, home, value, _ in symbols if info == _GLOBAL_FUNCTION
    ]
    if len(entries) != 1:
        raise ValueError(f"{len(entries)} global functions, not one")
    return bytes(code), entries[0]


def _place(file: bytes, sections: list[_Section]) -> tuple[bytearray, dict[int, int]]:
    """Code and constants one after the other, and where each section begins."""
    code, places = bytearray(), {}
    for number, section in enumerate(sections):
        if section.kind == _PROGBITS and section.flags & _ALLOC and section.size:
            if section.flags & _WRITE or section.alignment > _LEAST_ALIGNMENT:
                raise ValueError(f"section {number} can be written, or is aligned to more")
            places[number] = len(code)
            code += _content(file, section)
            code += bytes(-len(code) % _LEAST_ALIGNMENT)
    return code, places


def _content(file: bytes, section: _Section) -> bytes:
    return file[section.offset : section.offset + section.size]
