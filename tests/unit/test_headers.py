# SPDX-License-Identifier: Apache-2.0
"""Which kernel headers BCC is given, tried on made-up file systems."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from nicps.dataplane import headers
from nicps.errors import KernelHeadersMissing

RELEASE = platform.release()


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def touch(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def debian(root: Path, version: str) -> tuple[Path, Path]:
    """Debian's two trees: what is common, and what is amd64's."""
    common = root / f"usr/src/linux-headers-{version}-common"
    arch = root / f"usr/src/linux-headers-{version}-cloud-amd64"
    touch(common / "include/linux/kconfig.h")
    touch(common / "arch/x86/include/asm/one.h")
    touch(arch / "include/generated/autoconf.h")
    touch(arch / "arch/x86/include/generated/asm/two.h")
    touch(arch / "Makefile", f"include /usr/src/linux-headers-{version}-common/Makefile\n")
    return common, arch


def test_debian_pair_is_merged(tmp_path: Path) -> None:
    common, arch = debian(tmp_path, "6.1.0-9")
    debian(tmp_path, "5.10.0-30")
    found = headers.find(tmp_path)
    assert found.trees == (common, arch), "the newest"
    merged = found.folder(tmp_path / "cache")
    assert merged is not None
    assert (merged / "include/linux/kconfig.h").is_file()
    assert (merged / "include/generated/autoconf.h").is_file()
    assert (merged / "arch/x86/include/asm/one.h").is_file()
    assert (merged / "arch/x86/include/generated/asm/two.h").is_file()
    assert found.folder(tmp_path / "cache") == merged
    assert list((tmp_path / "cache").iterdir()) == [merged], "nothing else is left there"
    os.utime(common, ns=(1, 1))
    assert found.folder(tmp_path / "cache") != merged, "another state, another folder"


def test_versions_are_numbers(tmp_path: Path) -> None:
    debian(tmp_path, "6.9.0-1")
    newest = debian(tmp_path, "6.10.0-1")
    assert headers.find(tmp_path).trees == newest


def test_one_whole_tree(tmp_path: Path) -> None:
    tree = tmp_path / "usr/src/linux-headers-6.8.0-31-generic"
    touch(tree / "include/linux/kconfig.h")
    touch(tree / "include/generated/autoconf.h")
    touch(tree / "arch/x86/include/generated/asm/two.h")
    found = headers.find(tmp_path)
    assert found.trees == (tree,)
    assert found.folder(tmp_path / "cache") == tree


def test_the_running_kernels_come_first(tmp_path: Path) -> None:
    debian(tmp_path, "6.1.0-9")
    touch(tmp_path / "lib/modules" / RELEASE / "build/include/generated/autoconf.h")
    assert headers.find(tmp_path).trees == ()
    assert headers.find(tmp_path).folder(tmp_path / "cache") is None


def test_in_the_kernel_itself(tmp_path: Path) -> None:
    touch(tmp_path / "sys/kernel/kheaders.tar.xz")
    assert headers.find(tmp_path).trees == ()


@pytest.mark.parametrize("lost", ["common", "cloud-amd64/include/generated/autoconf.h", "x86"])
def test_half_a_package_is_none(tmp_path: Path, lost: str) -> None:
    common, arch = debian(tmp_path, "6.1.0-9")
    if lost == "common":
        common.rename(tmp_path / "elsewhere")
    elif lost == "x86":
        (arch / "arch/x86").rename(arch / "arch/arm64")
    else:
        (arch / "include/generated/autoconf.h").unlink()
    with pytest.raises(KernelHeadersMissing, match=RELEASE):
        headers.find(tmp_path)


@pytest.mark.parametrize(
    ("system", "command"),
    [
        ({"ID": "debian"}, "apt-get install linux-headers-amd64"),
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "apt-get install linux-headers-generic"),
        ({"ID": "fedora"}, "kernel-devel"),
    ],
)
def test_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: dict[str, str], command: str
) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: system)
    with pytest.raises(KernelHeadersMissing, match=command):
        headers.find(tmp_path)
