# SPDX-License-Identifier: Apache-2.0
"""Compile and load BPF programs through BCC, in a child process.

BCC's compiler takes 150 MB and writes to stderr from C++; both stay in the child, which ends before `load` returns. It
returns only descriptors and an image (`nicps.dataplane.images`), for the next time and for programs that are loaded
later.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nicps import bpf_sources
from nicps.dataplane import bpf, headers, images
from nicps.errors import BpfLoadError, NotRoot

ProgramKind = Literal["xdp", "sched_cls"]

#: A compilation takes two to four seconds on a slow machine, a minute in a guest without KVM, and more if that is busy.
TIMEOUT_S = 300.0
#: BCC asks for -O2, and the last option counts. With -O2 LLVM 19 copies the paths through a program so often that the
#: verifier gives up; -O1 is as fast in `nicps bench kernel`.
_LEVEL = "-O1"
_MESSAGE_BYTES = 1 << 16
_LOG_BYTES = 1 << 24  # of the verifier, whose last line has the reason
_MOST_DESCRIPTORS = 253  # the kernel's SCM_MAX_FD


@dataclass(frozen=True, slots=True)
class Later:
    """A program that is not loaded yet: its instructions name the maps that were loaded."""

    source: str
    kind: ProgramKind
    code: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """Descriptors of the loaded programs and maps, by name, which the caller owns; and the programs that can be
    loaded, by name.
    """

    programs: dict[str, int]
    maps: dict[str, int]
    later: dict[str, Later] = field(default_factory=dict)

    def open(self, name: str) -> int:
        """Load a program of `later`; the caller owns it. The interpreter goes on meanwhile in other threads.

        Raises:
            BpfLoadError: the verifier refuses it.
        """
        program = self.later[name]
        number = bpf.PROGRAM_TYPES[program.kind]
        try:
            return bpf.program_load(number, program.code, 0, name)
        except OSError as refused:
            said = ctypes.create_string_buffer(_LOG_BYTES)
            with contextlib.suppress(OSError):
                os.close(bpf.program_load(number, program.code, 0, name, said))
            log = said.value.decode(errors="replace")
            reason = _verifier_reason(log) or os.strerror(refused.errno or 0)
            raise BpfLoadError(
                f"the kernel refuses {name} of {program.source}: {reason}", log
            ) from None

    def close(self) -> None:
        """Close all of them; no more programs can be loaded."""
        for fd in (*self.programs.values(), *self.maps.values()):
            os.close(fd)
        self.programs.clear()
        self.maps.clear()
        self.later.clear()


def need_root() -> None:
    """Raise NotRoot without the privileges to load BPF programs."""
    if os.geteuid() != 0:
        raise NotRoot("loading XDP programs needs root; run it with sudo")


def load(
    source: str,
    programs: Mapping[str, ProgramKind],
    defines: Mapping[str, int] | None = None,
    later: Mapping[str, ProgramKind] | None = None,
) -> Loaded:
    """Compile `source` (a name in `ebpf/`), unless that was done, and load the programs named, by their kind.

    Args:
        later: programs that are compiled, and loaded by `Loaded.open` only.

    Raises:
        NotRoot: without the privileges to load BPF programs.
        KernelHeadersMissing: there are none to compile with.
        BpfLoadError: BCC is missing, or the compiler or the verifier refuses; `.log` holds all their messages.
    """
    need_root()
    later = later or {}
    kernel_source = headers.find().folder()
    request = _request(source, programs, defines, later)
    place = images.place(request, kernel_source)
    with contextlib.suppress(OSError, LookupError, ValueError):  # then it is compiled
        loaded, maps, codes = images.load(place.read_bytes(), programs, later)
        return Loaded(loaded, maps, _later(source, later, codes))
    answer, fds, log = _compile(request, kernel_source)
    image = _kept(place, source, answer, fds, log)
    names = [*answer["programs"], *answer["maps"]]
    assert len(names) == len(fds)
    split = len(answer["programs"])
    maps = dict(zip(names[split:], fds[split:], strict=True))
    codes = images.codes(image, later, maps)
    return Loaded(
        dict(zip(names[:split], fds[:split], strict=True)), maps, _later(source, later, codes)
    )


def load_beside(
    others: Loaded,
    source: str,
    later: Mapping[str, ProgramKind],
    defines: Mapping[str, int] | None = None,
) -> Loaded:
    """Compile `source`, unless that was done, for the maps of `others` as far as these have them. All other maps are
    made.

    Returns the maps that were made, and `later`, whose programs `Loaded.open` loads.

    Raises:
        NotRoot, KernelHeadersMissing, BpfLoadError: as `load`; or a map of `others` differs from the source's.
    """
    need_root()
    kernel_source = headers.find().folder()
    request = _request(source, {}, defines, later)
    place = images.place(request, kernel_source)
    with contextlib.suppress(OSError, LookupError, ValueError):  # then it is compiled
        _, maps, codes = images.load(place.read_bytes(), {}, later, others.maps)
        return Loaded({}, maps, _later(source, later, codes))
    answer, fds, log = _compile(request, kernel_source)
    image = _kept(place, source, answer, fds, log)
    for fd in fds:  # those of the compiler's own maps
        os.close(fd)
    _, maps, codes = images.load(image, {}, later, others.maps)
    return Loaded({}, maps, _later(source, later, codes))


def _request(
    source: str,
    programs: Mapping[str, ProgramKind],
    defines: Mapping[str, int] | None,
    later: Mapping[str, ProgramKind],
) -> dict[str, Any]:
    return {
        "source": source,
        "text": bpf_sources.flatten(bpf_sources.path(source)),
        "programs": dict(programs),
        "defines": dict(defines or {}),
        "later": dict(later),
        "level": _LEVEL,
    }


def _kept(place: Path, source: str, answer: dict[str, Any], fds: list[int], log: str) -> bytes:
    """The image that was received last, kept for the next time."""
    if "error" in answer:
        raise _error(source, answer, log)
    with open(fds.pop(), "rb") as file:
        file.seek(0)
        image = file.read()
    with contextlib.suppress(OSError):  # the next time it is compiled again
        images.keep(place, image)
    return image


def _later(
    source: str, kinds: Mapping[str, ProgramKind], codes: Mapping[str, bytes]
) -> dict[str, Later]:
    return {name: Later(source, kind, codes[name]) for name, kind in kinds.items()}


def _compile(
    request: dict[str, Any], kernel_source: Path | None
) -> tuple[dict[str, Any], list[int], str]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if kernel_source is not None:
        environment["BCC_KERNEL_SOURCE"] = str(kernel_source)
    # -P: the current folder must not give a root process its modules.
    command = [sys.executable, "-P", "-m", "nicps.dataplane.compile", str(theirs.fileno())]
    with ours, theirs, tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            try:
                child.communicate(json.dumps(request).encode(), timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise BpfLoadError(
                    f"BCC did not compile {request['source']} within {TIMEOUT_S:.0f} s"
                ) from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        said.seek(0)
        log = said.read().decode(errors="replace")
        message, fds = _receive(ours)
    if not message:
        return {"error": "child", "detail": f"exit status {child.returncode}"}, [], log
    return json.loads(message), fds, log


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The bytes and descriptors that the child has sent before it ended (socket.recv_fds ignores its flags:
    inheritable descriptors).
    """
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    fds = array.array("i")
    try:
        message, ancillary, _, _ = channel.recvmsg(_MESSAGE_BYTES, room, flags)
    except (BlockingIOError, ConnectionResetError):
        return b"", []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, fds.tolist()


def _error(source: str, answer: dict[str, Any], log: str) -> BpfLoadError:
    kind = answer["error"]
    if kind == "bcc":
        return BpfLoadError(
            f"{sys.executable} has no BCC ({answer['detail']}): apt-get install python3-bpfcc, and give the virtual "
            "environment --system-site-packages",
            log,
        )
    if kind == "compile":
        first = re.search(r"^.*\berror: .*$", log, re.MULTILINE)
        return BpfLoadError(
            f"{source} does not compile: {first[0] if first else answer['detail']}", log
        )
    if kind == "load":
        reason = _verifier_reason(log) or answer["detail"]
        return BpfLoadError(f"the kernel refuses {answer['program']} of {source}: {reason}", log)
    last = log.strip().splitlines()[-1:] or ["no output"]
    return BpfLoadError(f"BCC's compiler died on {source} ({answer['detail']}): {last[0]}", log)


def _verifier_reason(log: str) -> str:
    """The verifier's last sentence: the line before its statistics."""
    lines = [
        line for line in log.splitlines() if line.strip() and not line.startswith("processed ")
    ]
    return lines[-1].strip() if lines else ""
