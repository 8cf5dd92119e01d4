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
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nicps.errors import EnvironmentProblem, NicpsError, UsageProblem  # noqa: E402

KVM_S = 20.0  # a guest that is not up by then hangs


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
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    args = parser.parse_args()
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        parser.error("say what to run there, after --")
    try:
        with tempfile.TemporaryDirectory(prefix="nicps-guest-") as folder:
            kernel = Kernel(args.kernel, Path(folder))
            kvm = has_kvm(kernel) if args.accel == "auto" else args.accel == "kvm"
            print(f"guest: Linux {kernel.version}, {'KVM' if kvm else 'TCG'}", file=sys.stderr)
            return kernel.run(
                argv,
                kvm=kvm,
                cpus=args.cpus,
                memory=args.memory,
                share=args.share,
                timeout_s=args.timeout,
            )
    except NicpsError as error:
        print(f"nicps: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


class Kernel:
    """A Debian kernel package, unpacked into a folder of its own.

    Raises:
        UsageProblem: it is no such package.
        EnvironmentProblem: a tool is missing.
    """

    def __init__(self, package: Path, folder: Path) -> None:
        self._vng = shutil.which("vng", path=f"{ROOT}/.venv/bin{os.pathsep}{os.environ['PATH']}")
        missing = [
            name
            for name, there in (
                ("virtme-ng (pip install virtme-ng)", self._vng),
                ("qemu-system-x86", shutil.which("qemu-system-x86_64")),
                ("busybox-static", shutil.which("busybox")),
                ("kmod", shutil.which("depmod")),
                ("udev", shutil.which("udevadm")),
            )
            if there is None
        ]
        if missing:
            raise EnvironmentProblem(f"to run guests this machine lacks {', '.join(missing)}")
        done = subprocess.run(
            ["dpkg-deb", "-x", str(package), str(folder)], capture_output=True, text=True
        )
        images = sorted(folder.glob("boot/vmlinuz-*"))
        if done.returncode or len(images) != 1:
            raise UsageProblem(f"{package} is no Debian kernel package: {done.stderr.strip()}")
        self.image = images[0]
        self.version = self.image.name.removeprefix("vmlinuz-")
        if not (folder / "lib").exists():  # since Debian 13 modules are below /usr only
            (folder / "lib").symlink_to("usr/lib")
        subprocess.run(["depmod", "-b", str(folder), self.version], check=True)

    def run(
        self,
        argv: Sequence[str],
        *,
        kvm: bool,
        cpus: int = 2,
        memory: str = "3G",
        share: Sequence[Path] = (),
        timeout_s: float = 1800.0,
    ) -> int:
        """Boot, run the command in the checkout, and end; the command's exit code.

        Raises:
            EnvironmentProblem: it took too long.
        """
        command = [str(self._vng), "--run", str(self.image), "--user", "root"]
        command += ["--cpus", str(cpus), "--memory", memory, "--cwd", str(ROOT), "--force-9p"]
        command += ["--overlay-rwdir", "/tmp", "--overlay-rwdir", "/var", "--overlay-rwdir", "/run"]
        command += [word for path in share for word in ("--rwdir", str(path.resolve()))]
        command += [] if kvm else ["--disable-kvm"]
        command += ["--exec", " ".join(argv)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(f"the guest did not end within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # QEMU does not end with who started it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def has_kvm(kernel: Kernel) -> bool:
    """Whether a guest boots with KVM: on some machines the device is there, and guests hang on it."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    try:
        return kernel.run(["true"], kvm=True, cpus=1, memory="512M", timeout_s=KVM_S) == 0
    except EnvironmentProblem:
        return False


if __name__ == "__main__":
    sys.exit(main())
