# SPDX-License-Identifier: Apache-2.0
"""The bpf(2) system call: maps, links and test runs, without a library.

File descriptors are plain integers that the caller owns. Every failure is an `OSError` that says which
command failed; the rooms above turn those that a user can mend into errors of `nicps.errors`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
from dataclasses import dataclass

#: `__NR_bpf` differs between architectures, and libc has no wrapper.
_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}

MAP_CREATE = 0
MAP_UPDATE_ELEM = 2
MAP_DELETE_ELEM = 3
PROG_LOAD = 5
PROG_ATTACH = 8
PROG_TEST_RUN = 10
PROG_GET_FD_BY_ID = 13
MAP_GET_FD_BY_ID = 14
OBJ_GET_INFO_BY_FD = 15
BTF_GET_FD_BY_ID = 19
MAP_FREEZE = 22
LINK_CREATE = 28
ENABLE_STATS = 32

PROGRAM_TYPES = {"sched_cls": 3, "xdp": 6}  # enum bpf_prog_type
F_XDP_HAS_FRAGS = 1 << 5  # of a program

XDP_ABORTED, XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT = range(5)
XDP_ATTACH = 37  # enum bpf_attach_type: BPF_XDP
TCX_INGRESS = 46
TCX_EGRESS = 47  # the same: BPF_TCX_EGRESS
XDP_FLAGS_SKB_MODE = 1 << 1
XDP_FLAGS_DRV_MODE = 1 << 2

_ATTR_BYTES = 128
_MAP_INFO_BYTES, _BTF_AT = 88, 64  # struct bpf_map_info: btf_id, btf_key_type_id, btf_value_type_id
_MOST_MAPS = 64
_PROG_INFO_BYTES, _RUN_TIME_AT = 208, 192  # struct bpf_prog_info: run_time_ns, run_cnt
#: The verifier gives up (EAGAIN) when a signal comes for its thread. Large programs take it some 0.3 s.
_LOAD_ATTEMPTS = 10
_libc: ctypes.CDLL | None = None


def _bpf(command: int, what: str, attr: ctypes.Array[ctypes.c_char]) -> int:
    global _libc
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(38, f"bpf(2) has no known number on {platform.machine()}")
    result: int = _libc.syscall(number, command, ctypes.byref(attr), len(attr))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _attr(fmt: str, *values: int | bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack("=" + fmt, *values), _ATTR_BYTES)


def map_like(shape_fd: int, entries: int, name: str) -> int:
    """Create a map that differs from another in its number of entries only.

    With its types too (BTF): Linux 6.1 does not accept a map without types in the place of a map that has them.
    """
    raw = _info(shape_fd, _MAP_INFO_BYTES)
    kind, _, key, value, _, flags = struct.unpack_from("=6I", raw)
    btf, *types = struct.unpack_from("=3I", raw, _BTF_AT)
    btf_fd = _bpf(BTF_GET_FD_BY_ID, "types of a map", _attr("I", btf)) if btf else 0
    try:
        return map_create(name, kind, key, value, entries, flags, types=(btf_fd, *types))
    finally:
        if btf:
            os.close(btf_fd)


def map_create(
    name: str,
    kind: int,
    key: int,
    value: int,
    entries: int,
    flags: int,
    inner_fd: int = 0,
    types: tuple[int, ...] = (),
) -> int:
    """Create a map; the caller owns it.

    Args:
        kind: number of its type (`enum bpf_map_type`); `key`, `value`: bytes of each.
        inner_fd: a map like those that a map of maps holds.
        types: descriptor of its BTF, and numbers of key's and value's type there.
    """
    fields = (kind, key, value, entries, flags, inner_fd, 0, name.encode()[:15], 0)
    what = f"map {name} of {entries} x {value} bytes"
    return _bpf(MAP_CREATE, what, _attr("IIIIIII16sIIII", *fields, *(types or (0, 0, 0))))


def map_update(map_fd: int, key: bytes, value: bytes) -> None:
    """Set one element. On a map of maps this returns after every program that saw the old one has ended."""
    k, v = (
        ctypes.create_string_buffer(key, len(key)),
        ctypes.create_string_buffer(value, len(value)),
    )
    _bpf(
        MAP_UPDATE_ELEM,
        "map update",
        _attr("I4xQQQ", map_fd, ctypes.addressof(k), ctypes.addressof(v), 0),
    )


def map_delete(map_fd: int, key: bytes) -> None:
    """Empty one element, if it is not empty. On a map of maps this returns as `map_update` does."""
    k = ctypes.create_string_buffer(key, len(key))
    with contextlib.suppress(FileNotFoundError):
        _bpf(MAP_DELETE_ELEM, "map delete", _attr("I4xQ", map_fd, ctypes.addressof(k)))


def map_freeze(map_fd: int) -> None:
    """Freeze a map: from now on only programs write, and no system call or new mapping. There may be no writable
    mapping yet.
    """
    _bpf(MAP_FREEZE, "map freeze", _attr("I", map_fd))


@dataclass(frozen=True, slots=True)
class MapInfo:
    """The kernel's description of a map; sizes in bytes."""

    kind: int
    id: int
    key: int
    value: int
    entries: int
    flags: int
    name: str

    @property
    def bytes(self) -> int:
        """Bytes of an array map's memory: elements lie at multiples of 8."""
        return (self.value + 7) // 8 * 8 * self.entries


def map_by_id(ident: int) -> int:
    """A descriptor of a map that another process made; the caller owns it."""
    return _bpf(MAP_GET_FD_BY_ID, f"map {ident}", _attr("I", ident))


def _info(fd: int, size: int) -> bytes:
    out = ctypes.create_string_buffer(size)
    _bpf(OBJ_GET_INFO_BY_FD, "object info", _attr("IIQ", fd, size, ctypes.addressof(out)))
    return out.raw


def map_info(map_fd: int) -> MapInfo:
    """Type, sizes and name of a map."""
    kind, ident, key, value, entries, flags, name = struct.unpack_from(
        "=IIIIII16s", _info(map_fd, 80)
    )
    return MapInfo(kind, ident, key, value, entries, flags, name.split(b"\0")[0].decode())


def map_memory(map_fd: int, writable: bool = True) -> mmap.mmap:
    """Map all of a BPF_F_MMAPABLE array, for reading and writing or, as a frozen one must be, for reading only.

    A descriptor that may only read refuses even a shared mapping for reading.

    Raises:
        OSError: it is frozen, and should be writable.
    """
    page = mmap.PAGESIZE
    size = (map_info(map_fd).bytes + page - 1) // page * page
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(map_fd, size, mmap.MAP_SHARED, protection)


def program_load(
    kind: int,
    instructions: bytes,
    flags: int,
    name: str,
    log: ctypes.Array[ctypes.c_char] | None = None,
) -> int:
    """Load a program as it is, without a compiler, as one of `PROGRAM_TYPES`; the caller owns it.

    Args:
        log: takes the verifier's messages; this makes it slower.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"Dual BSD/GPL")
    addresses = ctypes.addressof(code), ctypes.addressof(licence)
    label = name.encode()[:15]
    said = (1, len(log), ctypes.addressof(log)) if log is not None else (0, 0, 0)
    count = len(instructions) // 8
    attr = _attr("IIQQIIQII16s", kind, count, *addresses, *said, 0, flags, label)
    for _ in range(_LOAD_ATTEMPTS - 1):
        with contextlib.suppress(BlockingIOError):
            return _bpf(PROG_LOAD, f"program {name}", attr)
    return _bpf(PROG_LOAD, f"program {name}", attr)


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """The kernel's description of a program."""

    id: int
    name: str


def program_info(program_fd: int) -> ProgramInfo:
    """Id and name of a program (names are cut to 15 characters)."""
    raw = _info(program_fd, 80)
    return ProgramInfo(struct.unpack_from("=I", raw, 4)[0], raw[64:80].split(b"\0")[0].decode())


def program_maps(program_fd: int) -> list[int]:
    """Ids of the maps that a program uses, at most `_MOST_MAPS`."""
    ids = (ctypes.c_uint32 * _MOST_MAPS)()
    asked = struct.pack("=52xIQ", _MOST_MAPS, ctypes.addressof(ids))
    out = ctypes.create_string_buffer(asked, 80)
    attr = _attr("IIQ", program_fd, 80, ctypes.addressof(out))
    _bpf(OBJ_GET_INFO_BY_FD, "object info", attr)
    (count,) = struct.unpack_from("=I", out.raw, 52)
    return list(ids[: min(count, _MOST_MAPS)])


def program_run_time(program_fd: int) -> tuple[int, int]:
    """Nanoseconds that a program has run, and how often, while statistics were on (`enable_statistics`).

    The time of a program that it goes on with by a tail call is in its own time, and not in that of the called program.
    """
    run_ns, runs = struct.unpack_from("=QQ", _info(program_fd, _PROG_INFO_BYTES), _RUN_TIME_AT)
    return run_ns, runs


def enable_statistics() -> int:
    """From now on the kernel measures every run of every program, until the descriptor is closed."""
    return _bpf(ENABLE_STATS, "enable statistics", _attr("I", 0))


def open_program(ident: int) -> int:
    """A descriptor of a program that another process loaded; the caller owns it."""
    return _bpf(PROG_GET_FD_BY_ID, f"program {ident}", _attr("I", ident))


def program_by_id(ident: int) -> ProgramInfo:
    """The same as `program_info`, for a program that another process loaded."""
    fd = open_program(ident)
    try:
        return program_info(fd)
    finally:
        os.close(fd)


def xdp_link(program_fd: int, ifindex: int, flags: int) -> int:
    """Attach an XDP program; it is detached when the last descriptor of the link is closed, kill -9 included."""
    return _bpf(LINK_CREATE, "XDP attach", _attr("IIII", program_fd, ifindex, XDP_ATTACH, flags))


def tcx_link(program_fd: int, ifindex: int) -> int:
    """Attach a TC program to an interface's egress, likewise until the link is closed (Linux 6.6; else EINVAL)."""
    attr = _attr("IIIIIIQ", program_fd, ifindex, TCX_EGRESS, 0, 0, 0, 0)
    return _bpf(LINK_CREATE, "TCX attach", attr)


def tcx_attach(program_fd: int, ifindex: int) -> None:
    """Attach a TC program to an interface's ingress, as long as it is there (Linux 6.6; else EINVAL)."""
    attr = _attr("IIIIIIQ", ifindex, program_fd, TCX_INGRESS, 0, 0, 0, 0)
    _bpf(PROG_ATTACH, "TCX attach", attr)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a test run: the program's verdict, the frame after it, and the mean time of one run."""

    verdict: int
    frame: bytes
    duration_ns: int


def prog_test_run(program_fd: int, frame: bytes, repeat: int = 1, mark: int | None = None) -> Run:
    """BPF_PROG_TEST_RUN: run a program on a frame, without any interface.

    Args:
        mark: of the socket that the frame is from; for TC programs only.
    """
    given = ctypes.create_string_buffer(frame, len(frame))
    out = ctypes.create_string_buffer(4096)
    packet = b"" if mark is None else struct.pack("=III", 0, 0, mark)  # struct __sk_buff
    context = ctypes.create_string_buffer(packet, len(packet) or 1)
    attr = _attr(
        "IIIIQQIIIIQQ",
        program_fd,
        0,
        len(frame),
        len(out),
        ctypes.addressof(given),
        ctypes.addressof(out),
        repeat,
        0,
        len(packet),
        0,
        ctypes.addressof(context) if packet else 0,
        0,
    )
    _bpf(PROG_TEST_RUN, "test run", attr)
    _, verdict, _, size, _, _, _, duration = struct.unpack_from("=IIIIQQII", attr.raw)
    return Run(verdict, out.raw[:size], duration)
