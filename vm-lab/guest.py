#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command in a virtual machine with another kernel, on this machine's own files.

    .venv/bin/python vm-lab/guest.py --kernel linux-image-6.1.0-*.deb -- .venv/bin/python -m pytest tests/xdp

The kernel is a Debian package (not a -cloud one, which has no 9p file system), unpacked and not installed. The guest
sees this machine's file system (a copy on write: nothing that it writes stays, but in --share), and has the exit code
of its command. KVM is used where a guest boots with it in time, else QEMU's own translation.

Needs root, QEMU (Debian: qemu-system-x86 busybox-static kmod udev) and virtme-ng (`.venv/bin/pip install virtme-ng`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machines import Guest, Hardware, Kernel, choose, require_guests  # noqa: E402

from nicps.errors import NicpsError  # noqa: E402
from nicps.lab.shield import orderly  # noqa: E402


def main() -> int:
    """The command's exit code, or what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", type=Path, required=True, help="a linux-image-*.deb")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--memory", default="3G")
    parser.add_argument("--share", type=Path, action="append", default=[], help="written for good")
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    args = parser.parse_args()
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        parser.error("say what to run there, after --")
    try:
        require_guests()
        with orderly(), tempfile.TemporaryDirectory(prefix="nicps-guest-") as folder:
            kernel = Kernel(args.kernel, Path(folder))
            accelerator = choose(kernel, args.accel)
            print(f"guest: Linux {kernel.version}, {accelerator.upper()}", file=sys.stderr)
            hardware = Hardware(
                accelerator, cpus=args.cpus, memory=args.memory, share=tuple(args.share)
            )
            with Guest(kernel, hardware, shlex.join(argv)) as guest:
                guest.relay(partial(show, sys.stdout), partial(show, sys.stderr))
                return guest.wait(args.timeout)
    except NicpsError as error:
        print(f"nicps: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def show(stream: TextIO, text: bytes) -> None:
    """What the guest said, at once."""
    stream.buffer.write(text)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
