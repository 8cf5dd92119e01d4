# SPDX-License-Identifier: Apache-2.0
"""A job that cannot go on is saved, and `nicps resume` goes on from there: R18, R22."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.netns.labs import until
from tests.netns.members import LIGHT, Network, Run
from tests.netns.test_leaving import ends_well, under_way


@pytest.fixture(scope="module")
def module_network() -> Iterator[Network]:
    """In the place of the one with PyTorch."""
    with Network(3, program=LIGHT) as made:
        made.up()
        yield made


def test_too_few_are_left(three: Network, open_path: Path) -> None:
    """R22: with less than half of the members the model is saved, the job stops with an exit code of its own, and the
    hook is told why. `nicps resume` goes on from there.
    """
    told = hooked(three, open_path, "h1")
    child = under_way(three, open_path, rounds=100_000)
    status = three.status("h1")
    assert status is not None
    for host in ("h2", "h3"):
        three.end(host, signal.SIGKILL)
        gone = [{"h2"}, {"h2", "h3"}][host == "h3"]
        until(lambda gone=gone: left(three, "h1") >= gone or three.stands_by("h1"), f"{gone} left")
    text = three.finish(child).error(6)
    kept = three.place("h1", "runs") / status["job"] / "checkpoint" / "checkpoint.npz"
    assert kept.stat().st_size
    with np.load(kept) as saved:
        trained = json.loads(saved["state.json"])["progress"]["round"]
    assert re.fullmatch(
        rf"h\d, h\d left: 1 of 3 members remain; saved after {trained} rounds of training in"
        rf" {re.escape(str(kept.parent))}: `nicps resume` goes on from there",
        text,
    ), text
    until(told.exists, "the hook has run")
    assert told.read_text() == f"1|{text}|"
    picture = kept.parent.parent / "report.html"
    until(picture.exists, "the report of what there was", 60.0)
    page = picture.read_text()
    assert 'class="mark alarm"' in page and "the run did not get to its end" in page
    ended = three.status("h1")
    assert ended is not None and ended["last_job"]["error"] == text
    three.all_stand_by("h1")
    three.leave("h1")  # the next test wants no hook
    three.ready()
    goes_on_from(three, "h1", kept)


@pytest.mark.long
def test_no_majority_is_left(three: Network, open_path: Path) -> None:
    """R18: two of three are killed at once. The last one may not go on: it saves its state, runs the hook once, and
    waits. As the others do not come back to the job, the user makes it leave, join, and resume the saved job.
    """
    told = hooked(three, open_path, "h3")
    child = under_way(three, open_path, 100_000)
    status = three.status("h3")
    assert status is not None
    for host in ("h1", "h2"):
        os.killpg(three.agents[host].process.pid, signal.SIGKILL)
    for host in ("h1", "h2"):
        three.end(host, signal.SIGKILL)
    three.finish(child)
    until(told.exists, "the hook has run")
    kept = three.place("h3", "runs") / status["job"] / "checkpoint"
    said = told.read_text().removeprefix("1|").removesuffix("|")
    assert re.fullmatch(
        r"h[12], h[12] cannot be heard, and there is no majority without: standing by; "
        rf"saved after \d+ rounds of training in {re.escape(str(kept))}",
        said,
    ), said
    status = three.status("h3")
    assert status is not None and status["trouble"] == said and status["job"]
    refused = three.command("h3", "resume", "--runs", str(three.place("h3", "runs"))).error(4)
    assert said in refused and "nicps leave" in refused
    told.unlink()
    assert three.command("h3", "leave").code == 0
    three.end("h3", signal.SIGTERM)
    assert not told.exists()  # once
    three.ready()
    goes_on_from(three, "h3", kept / "checkpoint.npz")


def hooked(network: Network, folder: Path, host: str) -> Path:
    """Join there with an alarm hook; the file in which it leaves the number of its arguments, and the first."""
    told, hook = folder / "told", folder / "hook"
    hook.write_text(f'#!/bin/sh\nprintf "%s|" "$#" "$1" >{told}.part && mv {told}.part {told}\n')
    hook.chmod(0o755)
    network.leave(host)
    network.join(host, "--alarm-hook", f'{hook} "$1"')
    network.ready()
    return told


def goes_on_from(network: Network, starter: str, checkpoint: Path, light: bool = True) -> None:
    """`nicps resume` of the newest run on a host trains three rounds more, from the weights that were saved.

    `light`: the job needs no PyTorch; its optimizer's momentum was saved too.
    """
    with np.load(checkpoint) as saved:
        trained = json.loads(saved["state.json"])["progress"]["round"]
        velocity = saved["optimizer/state/0/momentum_buffer"] if light else np.float32(0)
    weights = saved_weights(checkpoint)
    runs = str(network.place(starter, "runs"))
    settings = [f"rounds={trained + 3}", "quorum=1.0", "save_gradients=true"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    command = ["resume", "--runs", runs, "--wait", "--json", *arguments]
    done = network.command(starter, *command, light=light)
    result = ends_well(done, set(network.names), rounds=3)
    assert result["trained_rounds"] == trained + 3
    run = Run(result, [], {host: network.place(host, "runs") for host in network.names})
    for host in network.names:
        rounds = [row["trained_rounds"] for row in run.training(host)]
        assert rounds == [trained + 1, trained + 2, trained + 3]
    rate, momentum = (0.05, 0.9) if light else (0.1, 0.0)
    vector = weights
    for _, members in sorted(run.gradients().items()):
        velocity = np.float32(momentum) * velocity + members[1]["total"] / members[1]["n"]
        vector = vector - np.float32(rate) * velocity
    folder = run.of(starter).parent
    final = (
        saved_weights(folder / "checkpoint" / "checkpoint.npz")
        if light
        else trained_weights(folder)
    )
    assert np.allclose(vector, final, rtol=0, atol=1e-5)
    assert not np.allclose(weights, final, atol=1e-4)


def saved_weights(checkpoint: Path) -> npt.NDArray[np.float32]:
    """Those in a checkpoint, as a vector."""
    with np.load(checkpoint) as saved:
        names = [name for name in saved.files if name.startswith("model/")]
        return np.concatenate([saved[name].ravel() for name in names])


def trained_weights(folder: Path) -> npt.NDArray[np.float32]:
    """Those of PyTorch's model in a run's folder, as a vector."""
    import torch

    model = torch.load(folder / "model.pt", weights_only=True)
    return np.asarray(torch.cat([tensor.ravel() for tensor in model.values()]).numpy())


def left(network: Network, host: str) -> set[str]:
    """Names of the members that have left the view, as that host's status shows them."""
    status = network.status(host)
    assert status is not None
    return {member["name"] for member in status["members"] if member["state"] == "left"}
