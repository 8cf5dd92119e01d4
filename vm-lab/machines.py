# SPDX-License-Identifier: Apache-2.0
"""Virtual machines with a Debian kernel on this machine's own files: virtme-ng starts QEMU.

A guest runs one shell command and ends with it. It sees this machine's file system as a copy on write (nothing that it
writes stays, but in folders that it shares). Whether KVM works is tried: on some machines /dev/kvm is there, and guests
hang or end on it; QEMU's own translation (TCG) does everywhere, some twenty times slower.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from nicps.errors import EnvironmentProblem, UsageProblem
from nicps.programs import require_programs, search_path

ROOT = Path(__file__).resolve().parent.parent
KVM_S = 20.0  # a guest that is not up by then hangs
RELAY_S = 5.0  # for what it said last

#: What guests need on this machine.
PROGRAMS = (
    *("vng", "virtme-run", "qemu-system-x86_64"),
    *("busybox", "dpkg-deb", "depmod", "udevadm"),
)

Accelerator = Literal["kvm", "tcg"]

# virtme-ng mounts this machine's root without a cache, so PyTorch's import reads its 400 MB again and again (85 s
# under TCG, 30 s with one): what programs are loaded from is mounted a second time.
_FILES = "/run/nicps-files"
_CACHED = "/usr", sys.prefix


def require_guests() -> None:
    """See to it that guests can be run.

    Raises:
        EnvironmentProblem: a program that they need is not installed.
    """
    require_programs(*PROGRAMS, purpose="a guest")


class Kernel:
    """A Debian kernel package (not a -cloud one, which has no 9p file system), unpacked into a folder of its own.

    Raises:
        UsageProblem: it is no such package.
        EnvironmentProblem: a tool is missing.
    """

    def __init__(self, package: Path, folder: Path) -> None:
        self.vng, unpacker, depmod = require_programs(
            "vng", "dpkg-deb", "depmod", purpose="a guest"
        )
        self.folder = folder
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            [unpacker, "-x", str(package), str(folder)], capture_output=True, text=True
        )
        images = sorted(folder.glob("boot/vmlinuz-*"))
        if done.returncode or len(images) != 1:
            said = (done.stderr.strip().splitlines() or ["it holds no kernel"])[-1]
            raise UsageProblem(f"{package} is no Debian kernel package: {said}")
        self.image = images[0]
        self.version = self.image.name.removeprefix("vmlinuz-")
        if not (folder / "lib").exists():  # since Debian 13 modules are below /usr only
            (folder / "lib").symlink_to("usr/lib")
        if not list(folder.glob("lib/modules/*/kernel/fs/9p")):
            raise UsageProblem(f"{package} has no 9p file system: take the kernel without -cloud")
        subprocess.run([depmod, "-b", str(folder), self.version], check=True)


@dataclass(frozen=True)
class Hardware:
    """What a guest has. `share` are folders that it writes for good, `devices` more options for QEMU."""

    accelerator: Accelerator
    cpus: int = 1
    memory: str = "2G"
    name: str = "guest"
    share: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ()


class Guest:
    """A virtual machine that runs a shell command as root in the checkout, from when it is made.

    `process` is virtme-ng, with the command's stdin, stdout and stderr as pipes that somebody must read: `relay` does.
    (QEMU would empty a file, and both streams would write over each other.) As a context manager it ends the machine,
    however far it is.
    """

    def __init__(self, kernel: Kernel, hardware: Hardware, command: str) -> None:
        self.name, self.kernel, self.hardware = hardware.name, kernel, hardware
        self._relays: list[threading.Thread] = []
        files = "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap"
        qemu = ["-fsdev", files, "-device", "virtio-9p-pci,fsdev=files,mount_tag=files"]
        vng = [kernel.vng, "--run", str(kernel.image), "--user", "root"]
        vng += ["--cpus", str(hardware.cpus), "--memory", hardware.memory, "--name", self.name]
        vng += ["--cwd", str(ROOT), "--force-9p"]
        vng += [w for path in ("/tmp", "/var", "/run") for w in ("--overlay-rwdir", path)]
        vng += [w for path in hardware.share for w in ("--rwdir", str(path.resolve()))]
        vng += [] if hardware.accelerator == "kvm" else ["--disable-kvm"]
        vng += [f"--qemu-opts={shlex.join([*qemu, *hardware.devices])}"]
        # In a file: the kernel's command line, where virtme-ng puts it, has no room for long ones.
        script = kernel.folder / f"{self.name}.sh"
        script.write_text(f"{_cache()} || exit\n{command}\n")
        vng += ["--exec", shlex.join(["sh", str(script)])]
        # Its temporary files go with the kernel's folder, and its own session with QEMU: vng leaves both.
        environment = {**os.environ, "PATH": search_path(), "TMPDIR": str(kernel.folder)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            vng, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
        )

    def relay(self, out: Callable[[bytes], object], err: Callable[[bytes], object]) -> None:
        """Hand on, in threads, what comes on the two streams, as it comes."""
        for stream, take in ((self.process.stdout, out), (self.process.stderr, err)):
            thread = threading.Thread(target=_pump, args=(stream, take), daemon=True)
            thread.start()
            self._relays.append(thread)

    def wait(self, timeout_s: float) -> int:
        """Until the command has ended; its exit code (255: the machine ended without one).

        Raises:
            EnvironmentProblem: it took too long.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(
                f"the guest {self.name} did not end within {timeout_s:g} s"
            ) from None
        for thread in self._relays:
            thread.join(RELAY_S)
        return code

    def end(self) -> None:
        """Take the machine away, however far it is."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def choose(kernel: Kernel, asked: Accelerator | Literal["auto"]) -> Accelerator:
    """What was asked for; else KVM, if a guest boots with it within 20 seconds, or TCG."""
    if asked != "auto":
        return asked
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    with Guest(kernel, Hardware("kvm", memory="512M"), "true") as guest:
        guest.relay(lambda _: None, lambda _: None)
        try:
            return "kvm" if guest.wait(KVM_S) == 0 else "tcg"
        except EnvironmentProblem:
            return "tcg"


def _pump(stream: BinaryIO, take: Callable[[bytes], object]) -> None:
    with stream:
        while chunk := os.read(stream.fileno(), 1 << 16):
            take(chunk)


def _cache() -> str:
    """Mount what programs are loaded from with a cache."""
    options = "ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000"
    mounts = [f"mkdir -p {_FILES}", f"mount -t 9p -o {options} files {_FILES}"]
    for path in map(shlex.quote, _CACHED):
        mounts += [f"mount --bind {_FILES}{path} {path}"]
    return " && ".join(mounts)
