# SPDX-License-Identifier: Apache-2.0
"""Compiling and loading: what comes back, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nicps.dataplane import bpf, headers, loader
from nicps.errors import BpfLoadError, KernelHeadersMissing, NotRoot

GOOD = """
#include <uapi/linux/bpf.h>
#include "include/nicps_wire.h"
BPF_F_TABLE("array", u32, u64, words, 4, BPF_F_MMAPABLE);
int verdict(struct xdp_md *ctx)
{
	u32 key = 0;
	u64 *word = words.lookup(&key);

	if (word)
		*word += 1;
	return VERDICT;
}
"""


def write(path: Path, text: str) -> str:
    source = path / "program.c"
    source.write_text(text)
    return str(source)


def test_descriptors_come_back(tmp_path: Path) -> None:
    loaded = loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX})
    assert set(loaded.programs) == {"verdict"}
    assert set(loaded.maps) == {"words"}
    fds = [loaded.programs["verdict"], loaded.maps["words"]]
    assert bpf.program_info(fds[0]).name == "verdict"
    assert not any(os.get_inheritable(fd) for fd in fds)
    assert bpf.prog_test_run(fds[0], bytes(64), 3).verdict == bpf.XDP_TX
    assert bpf.map_memory(fds[1])[:8] == b"\3" + bytes(7)
    loaded.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_nothing_of_bcc_stays_here(tmp_path: Path) -> None:
    loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": 2}).close()
    assert "bcc" not in sys.modules
    assert "libbcc" not in Path("/proc/self/maps").read_text()


def test_compiler_error_names_file_and_line(tmp_path: Path) -> None:
    source = write(tmp_path, GOOD.replace("*word += 1", "*word += nothing"))
    with pytest.raises(BpfLoadError, match=r"program\.c:11:\d+: error: .*'nothing'") as caught:
        loader.load(source, {"verdict": "xdp"}, {"VERDICT": 2})
    assert "\n" not in str(caught.value)
    assert "1 error generated" in caught.value.log


def test_verifiers_reason(tmp_path: Path) -> None:
    source = write(tmp_path, GOOD.replace("return VERDICT", "return *(u8 *)(long)ctx->data"))
    with pytest.raises(BpfLoadError, match=r"refuses verdict of .*outside of the packet") as caught:
        loader.load(source, {"verdict": "xdp"}, {"VERDICT": 2})
    assert "\n" not in str(caught.value)


def test_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path))
    with pytest.raises(KernelHeadersMissing, match=f"BCC_KERNEL_SOURCE={tmp_path}"):
        loader.load("nicps.c", {"nicps_xdp": "xdp"})
    monkeypatch.delenv("BCC_KERNEL_SOURCE")
    with pytest.raises(KernelHeadersMissing, match="install"):
        headers.find(tmp_path)


def test_no_bcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bcc.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BpfLoadError, match=r"has no BCC .*python3-bpfcc"):
        loader.load("nicps.c", {"nicps_xdp": "xdp"})


def test_compiler_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bcc.py").write_text("import os, sys\nprint('broken', file=sys.stderr)\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BpfLoadError, match=r"died on nicps\.c \(exit status -6\)"):
        loader.load("nicps.c", {"nicps_xdp": "xdp"})


def test_not_root() -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            loader.load("nicps.c", {"nicps_xdp": "xdp"})
        except NotRoot:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    loader.load("nicps.c", {"nicps_xdp": "xdp"}).close()
    with pytest.raises(BpfLoadError):
        loader.load("nicps.c", {"no_such": "xdp"})
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
