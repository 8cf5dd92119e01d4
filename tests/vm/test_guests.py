# SPDX-License-Identifier: Apache-2.0
"""Guests with Debian's kernels: the XDP tests in each, and two that train with one another.

NICPS_KERNELS names a folder of linux-image-*.deb (vm-lab/README.md says how to get them); every one of them is tried.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = sorted(Path(os.environ.get("NICPS_KERNELS") or os.devnull).glob("linux-image-*.deb"))
KERNELS = [path for path in KERNELS if "-cloud-" not in path.name]
EACH = [pytest.param(path, id=path.name.split("_")[0]) for path in KERNELS]
LIMIT_S = 3600
#: Mutated frames in a guest, where a frame takes some ten times as long as here.
FUZZ_FRAMES = 10_000

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not KERNELS, reason="vm: NICPS_KERNELS names no folder with linux-image-*.deb"
    ),
]


def start(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "vm-lab" / script, *arguments]
    return subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def run(script: str, *arguments: str | Path) -> tuple[int, str, str]:
    """The exit code, and what was said on stdout and stderr."""
    process = start(script, *arguments)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.terminate()  # it takes its guests along
        process.wait()
    return process.returncode, out, err


def left_behind(places: Path) -> set[str]:
    """Files in the folder for temporary ones, and QEMU's processes that use them."""
    found = {str(path) for path in places.iterdir()}
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(places) in command:
            found.add(command)
    return found


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    path = tmp_path / "places"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


def test_two_kernels() -> None:
    """A matrix of one kernel shows nothing of another."""
    versions = sorted({path.name.split("_")[0].removeprefix("linux-image-") for path in KERNELS})
    print(f"\nkernels: {', '.join(versions)}")
    assert len(versions) > 1, f"NICPS_KERNELS must hold two different kernels: {versions}"


@pytest.mark.parametrize("kernel", EACH)
def test_xdp(kernel: Path, places: Path) -> None:
    """All that a test run marks `xdp` passes there, mutated frames too, and nothing is skipped."""
    command = ["env", "NICPS_NO_SKIPS=1", f"NICPS_FUZZ_FRAMES={FUZZ_FRAMES}", sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"timeout={LIMIT_S}"]
    code, out, err = run("guest.py", "--kernel", kernel, "--", *command, "tests/xdp")
    assert code == 0, out[-4000:] + err[-2000:]
    (summary,) = re.findall(r"^=* ?(\d+ passed.*?) in ", out, re.MULTILINE)
    assert "skipped" not in summary and "failed" not in summary, summary
    print(f"\n{err.splitlines()[0]}: {summary}")
    assert not left_behind(places)


def test_two_train(places: Path, tmp_path: Path) -> None:
    """A third of the digits job, a kernel each, in under ten minutes.

    (The whole of it takes under ten minutes as well, unless other programs want the processors too.)
    """
    chosen = [word for kernel in KERNELS[:2] for word in ("--kernel", kernel)]
    begun = time.monotonic()
    options = ("--vms", "2", "--set", "epochs=10", "--runs", tmp_path / "runs")
    code, out, err = run("vm_lab.py", *chosen, *options)
    seconds = time.monotonic() - begun
    assert code == 0, err[-4000:]
    result = json.loads(out.splitlines()[-1])
    print(f"\n{json.dumps(result)}")
    assert result["hosts"] == 2 and result["weights_identical"] is True
    assert result["xdp_mode"] == "native" and result["frames"] > 0
    assert result["test_accuracy"] > 0.94
    assert Path(result["report"]).is_file()
    assert seconds < 600
    assert not left_behind(places)


def test_ended_in_the_middle(places: Path, tmp_path: Path) -> None:
    """SIGINT while the guests boot or join: nothing stays."""
    process = start("vm_lab.py", "--kernel", KERNELS[0], "--runs", tmp_path / "runs")
    try:
        assert process.stderr is not None
        while "h2: Linux" not in (line := process.stderr.readline()):
            assert line, "it ended early"
        deadline = time.monotonic() + 60
        while not any("qemu" in found for found in left_behind(places)):
            assert time.monotonic() < deadline, "no guest starts"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.terminate()
        process.communicate()
    assert not left_behind(places)


def test_a_job_that_fails(places: Path, tmp_path: Path) -> None:
    """One line, and the exit code of `nicps submit`."""
    job = tmp_path / "broken"
    job.mkdir()
    (job / "job.py").write_text("raise ValueError('broken on purpose')\n")
    for path in (tmp_path, *tmp_path.parents[:2], job, job / "job.py"):
        path.chmod(0o755)
    code, out, err = run("vm_lab.py", job, "--kernel", KERNELS[0], "--runs", tmp_path / "runs")
    assert code == 5 and not out, err
    assert "broken on purpose" in err.splitlines()[-1], err
    assert not left_behind(places)
