# SPDX-License-Identifier: Apache-2.0
"""The child process in which BCC compiles and loads a BPF source; see `nicps.dataplane.loader`.

Reads one JSON request from stdin, and answers with one JSON line on the socket whose descriptor is the only argument.
With that line it hands over the descriptors of programs and maps (SCM_RIGHTS), and that of the image in memory.
Messages of the compiler and the verifier go to stderr, which the parent keeps.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from typing import Any

from nicps.dataplane import images


def _load(request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    try:
        import bcc
    except ImportError as error:
        return {"error": "bcc", "detail": str(error)}, []
    kinds = {"xdp": bcc.BPF.XDP, "sched_cls": bcc.BPF.SCHED_CLS}
    defines = (f"-D{name}={value}" for name, value in request["defines"].items())
    cflags = [request["level"], *defines]
    try:
        program = bcc.BPF(text=request["text"].encode(), cflags=cflags)
    except Exception as error:  # BCC raises bare Exception
        return {"error": "compile", "detail": str(error)}, []
    programs: dict[str, int] = {}
    codes: dict[str, bytes] = {}
    for name, kind in {**request["programs"], **request["later"]}.items():
        try:
            if name in request["programs"]:
                programs[name] = program.load_func(name.encode(), kinds[kind]).fd
            codes[name] = program.dump_func(name.encode())
        except Exception as error:
            return {"error": "load", "program": name, "detail": str(error)}, []
    maps = _maps(program)
    image = os.memfd_create("image")
    with open(image, "wb", closefd=False) as file:
        file.write(images.make(request["text"], codes, maps))
    fds = [*programs.values(), *maps.values(), image]
    return {"programs": list(programs), "maps": list(maps)}, fds


def _maps(program: Any) -> dict[str, int]:
    # BCC's Python lists only the maps that have been asked for by name; its library knows all of them.
    import bcc

    lib, module = bcc.lib, ctypes.c_void_p(program.module)
    lib.bpf_num_tables.restype = ctypes.c_size_t
    lib.bpf_table_name.restype = ctypes.c_char_p
    lib.bpf_table_fd_id.restype = ctypes.c_int
    numbers = [ctypes.c_size_t(number) for number in range(lib.bpf_num_tables(module))]
    return {
        lib.bpf_table_name(module, number).decode(): lib.bpf_table_fd_id(module, number)
        for number in numbers
    }


def main() -> None:
    """Serve one request."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    request = json.loads(sys.stdin.read())
    answer, fds = _load(request)
    socket.send_fds(channel, [json.dumps(answer).encode()], fds)


if __name__ == "__main__":
    main()
