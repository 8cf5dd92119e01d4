# SPDX-License-Identifier: Apache-2.0
"""Runs a job's loops on the fake session: files prepared, dealt out, trained, in threads."""

from __future__ import annotations

import ast
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_session import FakeNetwork, FakeSession
from trainer import startup
from trainer.prepare import prepare
from trainer.records import shard
from trainer.run import train

#: Of a job.py, which imports NumPy as np: 161 samples to train with and 42 to test with, of three numbers each.
LINEAR = """
def data(path):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((203, 3)).astype(np.float32)
    y = x @ np.float32([[1], [2], [-1]])
    return {"x": x[:161], "y": y[:161]}, {"x": x[161:], "y": y[161:]}
"""

startup.import_torch()  # as the real programs do
_literal_eval, _one_at_a_time = ast.literal_eval, threading.Lock()


def _evaluate(text: str) -> Any:
    """NumPy reads a file's header with it; CPython 3.11 cannot do that in two threads (gh-106905)."""
    with _one_at_a_time:
        return _literal_eval(text)


ast.literal_eval = _evaluate  # type: ignore[assignment]


@dataclass
class Outcome:
    """What a run left: metrics and folders by member, in order."""

    network: FakeNetwork
    sessions: list[FakeSession]
    folders: list[Path]
    errors: list[BaseException | None]

    def metrics(self, number: int) -> list[dict[str, Any]]:
        text = (self.folders[number - 1] / "out" / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def deal(
    prepared: Mapping[str, Any], source: Path, target: Path, number: int, members: int
) -> None:
    """What the hand-out gives member `number`."""
    target.mkdir(parents=True)
    for file in prepared["files"]:
        if file["store"] == "all":
            shutil.copy(source / file["path"], target)
        else:
            first, end = shard(file["records"], number, members)
            size = file["record_bytes"]
            content = (source / file["path"]).read_bytes()[first * size : end * size]
            (target / file["path"]).write_bytes(content)


def run_job(
    job: Path,
    folder: Path,
    members: int = 4,
    data: str | None = None,
    tamper: Callable[[int, Path], None] | None = None,
    script: Callable[[FakeNetwork], None] | None = None,
    resume: Path | None = None,
    programs: Mapping[int, Callable[[FakeSession, Path], None]] | None = None,
    network: FakeNetwork | None = None,
    **settings: Any,
) -> Outcome:
    """Prepare `job` and train it on `members` members.

    `tamper` may change a member's files, `script` says what happens to the network, `resume` is a checkpoint, and
    `programs` are training programs other than ours, by member. `network` is of so many members.
    """
    prepared = prepare(job, folder / "prepared", data, settings, resume)
    merged = prepared["settings"]
    network = network or FakeNetwork(members, merged["batch"], merged["quorum"])
    sessions = [network.session(number, merged) for number in range(1, members + 1)]
    folders = [folder / f"h{number}" for number in range(1, members + 1)]
    errors: list[BaseException | None] = [None] * members
    if script is not None:
        script(network)
    for number, target in enumerate(folders, 1):
        sessions[number - 1].workdir = str(target)
        deal(prepared, folder / "prepared", target, number, members)
        if tamper is not None:
            tamper(number, target)

    def member(index: int) -> None:
        try:
            (programs or {}).get(index + 1, train)(sessions[index], folders[index])  # type: ignore[arg-type]
        except BaseException as error:
            errors[index] = error
            sessions[index].fail(str(error))

    threads = [threading.Thread(target=member, args=(index,)) for index in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Outcome(network, sessions, folders, errors)
