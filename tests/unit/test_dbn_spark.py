# SPDX-License-Identifier: Apache-2.0
"""The workers as tasks of Spark: the bits are those of a run without it, also where tasks are lost and run again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_dbn_cli import TINY, write_data

pytestmark = pytest.mark.spark


def test_spark_gives_the_bits_of_threads(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    results = []
    for master in ("local", "local[2]"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "nicps", "dbn", "--data", str(data), *TINY),
                *("--runs", str(tmp_path / "runs"), "--json", "--master", master),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    without, spark = results
    assert (without["reduce"], spark["reduce"], spark["master"]) == ("local", "spark", "local[2]")
    assert spark["weights_sha256"] == without["weights_sha256"]
    assert spark["test_error"] == without["test_error"]


@pytest.mark.long
def test_spark_submit_says_which_master(tmp_path: Path, checkout: Path) -> None:
    import pyspark

    home = Path(pyspark.__file__).parent
    data = write_data(tmp_path)
    done = subprocess.run(
        [
            *(str(home / "bin" / "spark-submit"), "--master", "local[3]"),
            *(str(checkout / "trainer" / "dbn" / "__main__.py"), "--data", str(data), *TINY),
            *("--runs", str(tmp_path / "runs"), "--epochs", "0", "--json"),
        ],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["master"] == "local[3]"


@pytest.mark.long
def test_training_that_diverges_is_told_as_without_spark(tmp_path: Path) -> None:
    words = ("--master", "local[2]", "--epochs", "0", "--lr", "1e30")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nicps", "dbn", "--data", str(write_data(tmp_path)), *TINY),
            *("--runs", str(tmp_path / "runs"), *words),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith(
        "nicps: error: fine-tuning, epoch 1: training diverges: a parameter is "
    )
    assert not list((tmp_path / "runs").iterdir())


FAILS_ONCE = """
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.dbn import master
from trainer.dbn.checkpoint import State
from trainer.dbn.reduce_local import LocalReducer
from trainer.dbn.cluster import connect
from trainer.dbn.reduce_spark import SparkReducer
from trainer.dbn.settings import Settings
from trainer.dbn.shards import Data, Shard, deal
from trainer.dbn.work import work

marks = Path(sys.argv[1])
settings = Settings(workers=3, layers=(6,), epochs=2, finetune=2, batch=4, averages=1)
random = np.random.default_rng(1)
shard = Shard(random.integers(0, 256, (30, 9), np.uint8), (np.arange(30) % 3).astype(np.uint8))
data = Data(shard, shard, (3, 3))

def lost(frame, task, start, split, shard):
    found = work(frame, task, start, split, shard)
    mark = marks / f"{task.phase}-{task.epoch}-{split}"
    if split == 1 and not mark.exists():
        mark.touch()
        import os
        os._exit(1)  # its process is gone with what it has computed
    return found

def run(reducer):
    try:
        return master.train(State(settings, ""), data, reducer, lambda state: None)
    finally:
        reducer.close()

dealt = deal(shard, settings)
wanted = run(LocalReducer(dealt))
found = run(SparkReducer(connect("local[2,4]"), dealt, lost))
assert len(list(marks.iterdir())) == 4, list(marks.iterdir())
assert found.tobytes() == wanted.tobytes()
print("same")
"""


@pytest.mark.long
def test_a_lost_task_changes_no_bit(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    script = tmp_path / "fails_once.py"
    script.write_text(FAILS_ONCE)
    done = subprocess.run(
        [sys.executable, str(script), str(marks)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["same"], done.stderr


@pytest.mark.long
@pytest.mark.parametrize("what", ["interrupt", "terminate", "java"])
def test_what_ends_a_job_of_spark_takes_a_line(tmp_path: Path, what: str) -> None:
    """An interrupt as from a terminal, which the whole process group gets; SIGTERM; the end of Spark's Java process."""
    runs = tmp_path / "runs"
    data = write_data(tmp_path, 12000, (28, 28))  # a pass takes about a second
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "nicps", "dbn", "--data", str(data), *TINY),
            *("--averages", "1", "--layers", "61,37", "--batch", "25"),
            *("--runs", str(runs), "--master", "local[2]", "--epochs", "100000"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        try:
            while "epoch 3/" not in process.stderr.readline():
                assert process.poll() is None
            begun = _processor_s(process.pid)
            while _processor_s(process.pid) < begun + 0.4:
                assert process.poll() is None
            if what == "interrupt":
                os.killpg(process.pid, signal.SIGINT)
            elif what == "terminate":
                process.terminate()
            else:
                (java,) = (pid for pid, name, _ in _session(process.pid) if name == "java")
                os.kill(java, signal.SIGKILL)
            said = [line for line in process.stderr if " left" not in line]
            assert process.wait(60) == {"interrupt": 130, "terminate": 143, "java": 3}[what]
        finally:
            process.kill()
    (folder,) = runs.iterdir()
    assert f"`nicps dbn --resume {folder}` goes on after them" in said[0], said
    errors = said[1:]
    if what != "java":
        assert errors == []
    else:
        (error,) = errors
        assert error.startswith("nicps: error: the Java process of Spark's driver, on this host, ")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_spark_starts_leaves_no_java_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "nicps", "dbn", "--data", str(write_data(tmp_path)), *TINY]
    with subprocess.Popen(
        [*command, "--runs", str(tmp_path / "runs"), "--master", "local[2]"],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            while not any(_is_driver(pid) for pid, *_ in _session(process.pid)):
                assert process.poll() is None
            os.kill(process.pid, number)
            assert process.wait(60) == 128 + number
            until = time.monotonic() + 20
            while left := [pid for pid, name, _ in _session(process.pid) if name == "java"]:
                assert time.monotonic() < until, left
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left
                os.killpg(process.pid, signal.SIGKILL)


def _is_driver(pid: int) -> bool:
    """Whether it is Spark's Java process, not the one that makes its command."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return False
    java = command.partition("\0")[0].endswith("/java")
    return java and "deploy.SparkSubmit" in command and "launcher.Main" not in command


def _processor_s(session: int) -> float:
    """Of all processes of the session, Spark's workers among them."""
    return sum(ticks for _, _, ticks in _session(session)) / os.sysconf("SC_CLK_TCK")


def _session(session: int) -> Iterator[tuple[int, str, int]]:
    """Its processes: number, name, and clock ticks on a processor."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            head, _, rest = path.read_text().rpartition(")")
            pid, _, name = head.partition(" (")
            fields = rest.split()
            if int(fields[3]) == session:
                yield int(pid), name, int(fields[11]) + int(fields[12])


@pytest.mark.long  # Spark tries for a minute
def test_what_answers_is_no_master(tmp_path: Path) -> None:
    """It takes connections, and says nothing in Spark's language."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"spark://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=_hang_up, args=(server,), daemon=True).start()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "nicps", "dbn", "--data", str(write_data(tmp_path))),
                *(*TINY, "--runs", str(tmp_path / "runs"), "--master", master),
            ],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 4, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"nicps: error: no Spark master answers at {master}"), done.stderr
    assert "Traceback" not in done.stderr


def _hang_up(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()
