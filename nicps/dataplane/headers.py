# SPDX-License-Identifier: Apache-2.0
"""Kernel headers for BCC's compiler.

BCC needs headers at run time, as one tree. Our programs only use the user API, so any recent `linux-headers` package
serves if the running kernel has none. Debian splits them in two (common files, and those of an architecture): these are
merged into a folder of links.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nicps.errors import KernelHeadersMissing

#: Root's, and removed with the next start of the machine.
CACHE = Path("/run/nicps")

_GENERATED = Path("include/generated/autoconf.h")
_ARCH = {
    "x86_64": "x86",
    "aarch64": "arm64",
    "riscv64": "riscv",
    "ppc64le": "powerpc",
    "s390x": "s390",
}
_DEBIAN = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "powerpc64le"}


@dataclass(frozen=True, slots=True)
class Headers:
    """Kernel headers on this machine.

    `trees` are the folders to merge, the later ones winning; none means that BCC finds the running kernel's by itself.
    """

    description: str
    trees: tuple[Path, ...]

    def folder(self, cache: Path = CACHE) -> Path | None:
        """The trees as one, for BCC_KERNEL_SOURCE; None if BCC finds its headers by itself.

        Several are merged as links below `cache`, once for each of their states.
        """
        if len(self.trees) < 2:
            return self.trees[0] if self.trees else None
        state = [(str(tree), tree.stat().st_mtime_ns) for tree in self.trees]
        merged = cache / f"headers-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}"
        if not merged.is_dir():
            cache.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Made aside and renamed, so that another process never sees a part of it.
            with tempfile.TemporaryDirectory(prefix="headers-", dir=cache) as aside:
                whole = Path(aside) / "whole"
                self._link(whole)
                with contextlib.suppress(OSError):  # another process was faster
                    whole.rename(merged)
        return merged

    def _link(self, into: Path) -> None:
        arch = Path("arch") / _ARCH.get(platform.machine(), platform.machine()) / "include"
        for part in (Path("include"), arch):
            target = into / part
            target.mkdir(parents=True)
            for tree in self.trees:
                for entry in sorted((tree / part).glob("*")):
                    link = target / entry.name
                    link.unlink(missing_ok=True)
                    link.symlink_to(entry.resolve())


def find(root: Path = Path("/")) -> Headers:
    """The headers that a compilation uses, the running kernel's first.

    Raises:
        KernelHeadersMissing: there are none; the message names the package to install.
    """
    given = os.environ.get("BCC_KERNEL_SOURCE")
    if given:
        if not (Path(given) / "include/linux/kconfig.h").is_file():
            raise KernelHeadersMissing(
                f"BCC_KERNEL_SOURCE={given} holds no kernel headers (include/linux/kconfig.h)"
            )
        return Headers(given, (Path(given),))
    release = platform.release()
    if (root / "lib/modules" / release / "build" / _GENERATED).is_file():
        return Headers(f"of the running kernel {release}", ())
    if (root / "sys/kernel/kheaders.tar.xz").is_file():
        return Headers("in /sys/kernel/kheaders.tar.xz", ())
    found = sorted(
        _installed(root / "usr/src"), key=lambda headers: _version(headers.trees[-1].name)
    )
    if found:
        return found[-1]
    raise KernelHeadersMissing(
        f"no kernel headers for {release}, nor any others in /usr/src: BCC cannot compile; run: {install_command()}"
    )


def install_command() -> str:
    """The command that installs headers on this distribution."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    names = {system.get("ID", ""), *system.get("ID_LIKE", "").split()}
    if "ubuntu" in names:
        return "apt-get install linux-headers-generic"
    if "debian" in names or not names - {""}:
        return (
            f"apt-get install linux-headers-{_DEBIAN.get(platform.machine(), platform.machine())}"
        )
    return f"install the kernel headers of {platform.release()} (kernel-devel, linux-headers)"


def _installed(folder: Path) -> Iterator[Headers]:
    arch = _ARCH.get(platform.machine(), platform.machine())
    for tree in folder.glob("linux-headers-*"):
        if (
            not (tree / _GENERATED).is_file()
            or not (tree / f"arch/{arch}/include/generated").is_dir()
        ):
            continue
        if (tree / "include/linux/kconfig.h").is_file():
            yield Headers(str(tree), (tree,))
            continue
        common = re.search(r"^include\s+(\S+)/Makefile", _text(tree / "Makefile"), re.MULTILINE)
        beside = folder / Path(common[1]).name if common else None
        if beside is not None and (beside / "include/linux/kconfig.h").is_file():
            yield Headers(f"{tree} with {beside}", (beside, tree))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))
