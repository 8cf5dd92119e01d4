# SPDX-License-Identifier: Apache-2.0
"""The checks of the host itself: kernel, BPF, BCC, headers, privileges, memory, Python packages."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from nicps.doctor.check import Check, fail, ok, warn
from nicps.extras import TESTED_TORCH, install_command

# bpf_xdp_load_bytes came with 5.18; compare-and-swap in BPF (5.12), mappable inner maps of any size
# (5.10) and XDP links (5.9) are older.
OLDEST_KERNEL = (5, 18)
OLDEST_TRIED_KERNEL = (6, 1)

# BCC's compiler needs 150 MB while it runs, an agent may take 300 MB, a trainer holds PyTorch.
LEAST_MEMORY_BYTES = 500 * 10**6
GOOD_MEMORY_BYTES = 1500 * 10**6

PACKAGES = ("numpy", "orjson", "pyroute2")
TRAINING = ("torch", "scikit-learn", "xxhash", "safetensors")

#: Those of packaging/nicps@.service, which says what each is for, by their numbers in linux/capability.h.
CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_NICE": 23,
}


def kernel_version(release: str) -> tuple[int, int]:
    """(6, 1) of "6.1.0-13-amd64"; (0, 0) without a number."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def check_kernel(release: str | None = None) -> Check:
    """The kernel is new enough for the XDP program and its maps."""
    release = os.uname().release if release is None else release
    version = kernel_version(release)
    if version < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        mend = f"boot a kernel of {oldest} or newer (Debian 12 has 6.1)"
        return fail("kernel", f"{release}, older than {oldest}", mend)
    if version < OLDEST_TRIED_KERNEL:
        return warn(
            "kernel", f"{release}, on which nicps was never tried", "6.1 and newer were tried"
        )
    return ok("kernel", release)


def check_btf(path: Path = Path("/sys/kernel/btf/vmlinux")) -> Check:
    """The kernel's own types; the present programs do without."""
    if path.exists():
        return ok("BTF", str(path))
    mend = "nothing to do: only programs that are compiled ahead of time will need it"
    return warn("BTF", f"no {path}", mend)


def check_jit(path: Path = Path("/proc/sys/net/core/bpf_jit_enable")) -> Check:
    """BPF programs run compiled, not interpreted."""
    try:
        enabled = path.read_text().strip() != "0"
    except OSError:
        return ok("BPF JIT", "always on, or not to be read here")
    if enabled:
        return ok("BPF JIT", "on")
    return warn("BPF JIT", "off: adding is many times slower", f"echo 1 > {path}")


def check_lockdown(path: Path = Path("/sys/kernel/security/lockdown")) -> Check:
    """Lockdown (with Secure Boot) can refuse BPF."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return ok("lockdown", "this kernel has none")
    mode = found.group(1) if found else "unreadable"
    if mode == "confidentiality":
        mend = "boot without lockdown=confidentiality if loading programs fails"
        return warn("lockdown", f"{mode}: the kernel may refuse programs", mend)
    return ok("lockdown", mode)


def check_bcc(python: str = sys.executable) -> Check:
    """BCC's Python module and its library, imported in a child: it maps 100 MB of compiler."""
    command = [python, "-c", "import bcc; print(bcc.__version__)"]
    mend = (
        "sudo apt-get install python3-bpfcc, and run nicps from a virtual environment made by"
        " /usr/bin/python3 -m venv --system-site-packages (`make setup` does both)"
    )
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail("BCC", f"`import bcc` did not end: {error}", mend)
    if child.returncode == 0:
        return ok("BCC", child.stdout.strip())
    lines = child.stderr.strip().splitlines() or ["no message"]
    return fail("BCC", f"`import bcc` failed in {python}: {lines[-1]}", mend)


def effective_capabilities(status: str) -> set[str]:
    """The names of the capabilities that nicps needs and `status` (/proc/PID/status) grants."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.M)
    mask = int(found.group(1), 16) if found else 0
    return {name for name, bit in CAPABILITIES.items() if mask >> bit & 1}


def check_privileges(status: str | None = None) -> Check:
    """The agent's capabilities: BPF, the interface, raw sockets, and another user with a network namespace for
    training.
    """
    held = effective_capabilities(
        Path("/proc/self/status").read_text() if status is None else status
    )
    lacking = sorted(CAPABILITIES.keys() - held)
    if not lacking:
        return ok("privileges", "root" if os.geteuid() == 0 else "by capabilities")
    who = "root, but without" if os.geteuid() == 0 else f"user {os.geteuid()} without"
    mend = (
        "the container or sandbox must grant them"
        if os.geteuid() == 0
        else "run `nicps join` (and this) with sudo"
    )
    return fail("privileges", f"{who} {', '.join(lacking)}", mend)


def check_memory(path: Path = Path("/proc/meminfo")) -> Check:
    """Memory that can be had without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", path.read_text(), re.M)
    available = int(found.group(1)) * 1024 if found else 0
    text = f"{available / 1e9:.1f} GB available"
    if available < LEAST_MEMORY_BYTES:
        needed = LEAST_MEMORY_BYTES // 10**6
        return fail("memory", f"{text}, less than {needed} MB", "end other programs, or add memory")
    if available < GOOD_MEMORY_BYTES:
        mend = "enough for a small model; a gradient of P parameters takes about 24 P bytes a host"
        return warn("memory", text, mend)
    return ok("memory", text)


def _versions(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The installed packages with their versions, and those that are not installed."""
    found, absent = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    return found, absent


def check_training(names: tuple[str, ...] = TRAINING) -> Check:
    """The Python packages that training programs import; a job may bring its own program that needs none of them."""
    found, absent = _versions(names)
    if absent:
        mend = f"`make setup` in the checkout, or {install_command('train')} (README.md: Install)"
        text = f"not installed: {', '.join(absent)}: PyTorch jobs cannot be trained here"
        return warn("training", text, mend)
    text = ", ".join(found)
    if not re.search(rf"\btorch {re.escape(TESTED_TORCH)}\.", text):
        mend = f"PyTorch {TESTED_TORCH} was tested; all hosts of a network need the same one"
        return warn("training", text, mend)
    return ok("training", text)


def check_packages(names: tuple[str, ...] = PACKAGES) -> Check:
    """The Python packages that nicps imports."""
    found, absent = _versions(names)
    if absent:
        mend = (
            f"`make setup` in the checkout, or {sys.executable} -m pip install {' '.join(absent)}"
        )
        return fail("packages", f"not installed: {', '.join(absent)}", mend)
    return ok("packages", ", ".join(found))
