# SPDX-License-Identifier: Apache-2.0
"""Compiling and loading: the results, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from nicps.dataplane import bpf, headers, images, loader
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


@pytest.fixture(autouse=True)
def image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing has been compiled yet."""
    folder = tmp_path / "images"
    monkeypatch.setattr(images, "FOLDER", folder)
    return folder


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on compiling fails."""

    def compile_(*_: object) -> NoReturn:
        raise AssertionError("compiled")

    return lambda: monkeypatch.setattr(loader, "_compile", compile_)


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


LATER = """
int second(struct xdp_md *ctx)
{
	u32 key = 0;
	u64 *word = words.lookup(&key);

	if (word)
		*word += 10;
	return XDP_PASS;
}
"""


@pytest.mark.parametrize("image", ["none yet", "kept", "no room for one"])
def test_a_program_that_is_loaded_later(tmp_path: Path, image_folder: Path, image: str) -> None:
    """With the maps of the first, whether it has just been compiled or not."""
    source = write(tmp_path, GOOD + LATER)
    if image == "kept":
        loader.load(source, {"verdict": "xdp"}, {"VERDICT": 2}, later={"second": "xdp"}).close()
    elif image == "no room for one":
        image_folder.write_text("a file where the folder should be")
    loaded = loader.load(source, {"verdict": "xdp"}, {"VERDICT": 2}, later={"second": "xdp"})
    assert set(loaded.programs) == {"verdict"} and set(loaded.later) == {"second"}
    program = loaded.open("second")
    for fd in (program, loaded.programs["verdict"]):
        assert bpf.prog_test_run(fd, bytes(64)).verdict == bpf.XDP_PASS
    assert bpf.map_memory(loaded.maps["words"])[:8] == b"\x0b" + bytes(7)
    assert bpf.program_info(program).name == "second" and not os.get_inheritable(program)
    os.close(program)
    loaded.close()
    assert not loaded.later


def test_a_later_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BpfLoadError, match="the kernel refuses second of"):
        loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": 2}, {"second": "xdp"})


def test_verifiers_reason_later(tmp_path: Path) -> None:
    source = write(
        tmp_path, GOOD + LATER.replace("return XDP_PASS", "return *(u8 *)(long)ctx->data")
    )
    descriptors = len(os.listdir("/proc/self/fd"))
    loaded = loader.load(source, {"verdict": "xdp"}, {"VERDICT": 2}, later={"second": "xdp"})
    with pytest.raises(BpfLoadError, match=r"refuses second of .*outside of the packet") as caught:
        loaded.open("second")
    assert "\n" not in str(caught.value) and "processed" in caught.value.log
    loaded.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


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
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    descriptors = len(os.listdir("/proc/self/fd"))
    loader.load("nicps.c", {"nicps_xdp": "xdp"}).close()
    with pytest.raises(BpfLoadError, match="no_such"):
        loader.load(write(tmp_path, GOOD), {"no_such": "xdp"}, {"VERDICT": bpf.XDP_DROP})
    assert list(places.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_nothing_is_compiled_twice(tmp_path: Path, no_compiler: Callable[[], None]) -> None:
    """The maps are others each time; a changed source or definition is compiled."""
    source = write(tmp_path, GOOD)
    first = loader.load(source, {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX})
    no_compiler()
    second = loader.load(source, {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX})
    runs = [bpf.prog_test_run(each.programs["verdict"], bytes(64), 2) for each in (first, second)]
    assert [run.verdict for run in runs] == [bpf.XDP_TX, bpf.XDP_TX]
    for each in (first, second):
        assert bpf.map_memory(each.maps["words"])[:8] == b"\2" + bytes(7)
        each.close()
    with pytest.raises(AssertionError, match="compiled"):
        loader.load(source, {"verdict": "xdp"}, {"VERDICT": bpf.XDP_DROP})
    write(tmp_path, GOOD.replace("+= 1", "+= 2"))
    with pytest.raises(AssertionError, match="compiled"):
        loader.load(source, {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX})


def test_an_image_is_what_was_compiled(no_compiler: Callable[[], None]) -> None:
    """All maps of ours, with those that hold maps, and the program that is called by another."""
    kinds: dict[str, loader.ProgramKind] = {"nicps_xdp": "xdp", "nicps_egress": "sched_cls"}
    compiled = loader.load("nicps.c", kinds, later={"nicps_stripes": "xdp"})
    no_compiler()
    loaded = loader.load("nicps.c", kinds, later={"nicps_stripes": "xdp"})
    for each in (compiled, loaded):
        room = each.open("nicps_stripes")
        bpf.map_update(each.maps["nicps_rooms"], bytes(4), room.to_bytes(4, sys.byteorder))
        os.close(room)
    for name, fd in compiled.maps.items():
        ours, theirs = bpf.map_info(loaded.maps[name]), bpf.map_info(fd)
        assert replace(ours, id=0) == replace(theirs, id=0)
    inner = bpf.map_like(loaded.maps["slots_shape"], 3, "test")
    bpf.map_update(loaded.maps["slots"], bytes(4), inner.to_bytes(4, sys.byteorder))
    os.close(inner)
    loaded.close()
    compiled.close()


@pytest.mark.short("cut")
@pytest.mark.parametrize("damage", ["cut", "emptied", "other", "refused"])
def test_a_damaged_image_is_made_again(tmp_path: Path, image_folder: Path, damage: str) -> None:
    source = write(tmp_path, GOOD)
    loader.load(source, {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX}).close()
    (path,) = image_folder.iterdir()
    good = path.read_bytes()
    image = json.loads(good)
    image["programs"]["verdict"] = base64.b64encode(bytes(16)).decode()  # no program at all
    bad = {"cut": good[:-9], "emptied": b"", "other": b"{}", "refused": json.dumps(image).encode()}
    path.write_bytes(bad[damage])
    loaded = loader.load(source, {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX})
    assert bpf.prog_test_run(loaded.programs["verdict"], bytes(64)).verdict == bpf.XDP_TX
    loaded.close()
    assert json.loads(path.read_bytes()) == json.loads(good)
    assert [path] == list(image_folder.iterdir())


def test_no_room_for_an_image(tmp_path: Path, image_folder: Path) -> None:
    image_folder.write_text("a file where the folder should be")
    loaded = loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": bpf.XDP_TX})
    assert bpf.prog_test_run(loaded.programs["verdict"], bytes(64)).verdict == bpf.XDP_TX
    loaded.close()


def test_a_map_of_ports_is_kept(tmp_path: Path, no_compiler: Callable[[], None]) -> None:
    """The kernel gives it a flag that it refuses from others."""
    text = GOOD.replace("int verdict", "BPF_DEVMAP(ports, 4);\n\nint verdict")
    text = text.replace("return VERDICT", "return ports.redirect_map(0, BPF_F_BROADCAST)")
    source = write(tmp_path, text)
    loader.load(source, {"verdict": "xdp"}).close()
    no_compiler()
    loaded = loader.load(source, {"verdict": "xdp"})
    info = bpf.map_info(loaded.maps["ports"])
    assert (info.entries, info.value) == (4, 4)
    assert bpf.prog_test_run(loaded.programs["verdict"], bytes(64)).verdict == bpf.XDP_REDIRECT
    loaded.close()


BESIDE = """
#include <uapi/linux/bpf.h>
BPF_F_TABLE("array", u32, u64, words, 4, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, WORD, more, 2, BPF_F_MMAPABLE);
int both(struct xdp_md *ctx)
{
	u32 key = 0;
	u64 *word = words.lookup(&key);
	WORD *other = more.lookup(&key);

	if (word && other)
		*other = *word += 10;
	return XDP_DROP;
}
"""


def test_a_program_beside_others_uses_their_maps(
    tmp_path: Path, no_compiler: Callable[[], None]
) -> None:
    """Compiled, and from its image; its other maps are its own."""
    first = loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": 2})
    source = tmp_path / "beside.c"
    source.write_text(BESIDE.replace("WORD", "u64"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in (1, 2):
        beside = loader.load_beside(first, str(source), {"both": "xdp"})
        assert list(beside.maps) == ["more"] and not beside.programs
        program = beside.open("both")
        bpf.prog_test_run(program, bytes(64))
        assert bpf.map_memory(first.maps["words"])[0] == 10 * turn
        assert bpf.map_memory(beside.maps["more"])[0] == 10 * turn
        os.close(program)
        beside.close()
        no_compiler()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    first.close()


def test_a_map_of_another_shape_is_not_shared(tmp_path: Path) -> None:
    """The sources are of another version than what this process has loaded."""
    first = loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": 2})
    source = tmp_path / "beside.c"
    pair = 'struct pair { u64 a; u64 b; };\nBPF_F_TABLE("array", u32, struct pair, words'
    text = BESIDE.replace("WORD", "u64").replace('BPF_F_TABLE("array", u32, u64, words', pair)
    text = text.replace("u64 *word =", "struct pair *word =").replace("*word += 10", "word->b")
    source.write_text(text)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(
            BpfLoadError, match=r"the map words has another shape .* start it again"
        ):
            loader.load_beside(first, str(source), {"both": "xdp"})
    assert len(os.listdir("/proc/self/fd")) == descriptors
    first.close()


def test_a_program_beside_others_does_not_compile(tmp_path: Path) -> None:
    first = loader.load(write(tmp_path, GOOD), {"verdict": "xdp"}, {"VERDICT": 2})
    source = tmp_path / "beside.c"
    source.write_text("int both(struct xdp_md *ctx) { return nothing; }")
    with pytest.raises(BpfLoadError, match=r"beside\.c does not compile"):
        loader.load_beside(first, str(source), {"both": "xdp"})
    first.close()
