# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run of `nicps dbn`: it says what is kept, also where Spark makes something else of them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_dbn_cli import TINY, write_data
from trainer.dbn import cli, cluster, reduce_local, signals
from trainer.dbn.vectors import Means
from trainer.errors import JobError


@pytest.mark.parametrize(
    ("at", "error"),
    [(1, JobError("Spark: cannot access local variable 'sockfile'")), (0, None)],
    ids=["another error", "dropped"],
)
def test_an_interrupt_that_comes_out_as_something_else(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    error: JobError | None,
) -> None:
    class Interrupted(reduce_local.LocalReducer):
        """Of calls of Spark's that are interrupted, some raise another error in the end, and some raise none."""

        def epoch(self, phase: int, epoch: int, means: Means) -> tuple[Means, float]:
            if phase == at:
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:
                    if error is not None:
                        raise error from None
            return super().epoch(phase, epoch, means)

    monkeypatch.setattr(reduce_local, "LocalReducer", Interrupted)
    monkeypatch.setattr(cli.startup, "import_torch", lambda: None)
    runs = tmp_path / "runs"
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["--data", str(write_data(tmp_path)), *TINY, "--runs", str(runs)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    (folder,) = runs.iterdir()
    *_, last = capsys.readouterr().err.splitlines()
    assert last == f"nicps: 1 epoch is kept: `nicps dbn --resume {folder}` goes on after it"


def test_no_epoch_begins_again_after_an_interrupt() -> None:
    """`--reduce nicps` begins it again after errors of Spark's."""
    context: Any = SimpleNamespace(master="local[2]")

    def job() -> None:
        with cluster.watched(context):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise UnboundLocalError("cannot access local variable 'sockfile'") from None

    with signals.noted(), pytest.raises((signals.Stopped, JobError)) as raised:
        job()
    assert raised.type is signals.Stopped


def test_a_signal_that_is_held_back_comes_at_the_end() -> None:
    done = []

    def start() -> None:
        with signals.held():
            signal.raise_signal(signal.SIGTERM)
            done.append("all")

    with signals.noted(), pytest.raises(signals.Stopped) as raised:
        start()
    assert done == ["all"] and raised.value.exit_code == 143


def test_sigterm_says_what_is_kept_as_ctrl_c_does(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "nicps", "dbn", "--data", str(write_data(tmp_path)), *TINY]
    with subprocess.Popen(
        [*command, "--runs", str(runs), "--epochs", "100000"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            while "epoch 3/" not in process.stderr.readline():
                assert process.poll() is None
            process.terminate()
            said = [line for line in process.stderr if not line.endswith(" left\n")]
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    (folder,) = runs.iterdir()
    (last,) = said
    words = f"epochs are kept: `nicps dbn --resume {re.escape(str(folder))}` goes on after them\n"
    assert re.fullmatch(rf"nicps: \d+ {words}", last), last


HANDLERS = """
import signal
from trainer.dbn import cluster, signals

with signals.noted():
    before = signal.getsignal(signal.SIGINT)
    context = cluster.connect("local[1]")
    print("same" if signal.getsignal(signal.SIGINT) is before else "other")
    cluster.disconnect(context)
"""


@pytest.mark.spark
@pytest.mark.long
def test_spark_does_not_take_the_interrupt_over() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANDLERS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["same"], done.stderr
