# SPDX-License-Identifier: Apache-2.0
"""A NumPy-only trainer among three PyTorch ones: over the agent's socket, in JSON (docs/socket.md)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.errors import JobFailed
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import AgentProcess, Folders, await_agents, start_agent
from nicps.session.commands import await_result
from tests.netns.labs import ROOT, until
from tests.reaper import fresh_name

JOB = ROOT / "docs" / "examples" / "mlp"
PROGRAM = JOB / "numpy_trainer.py"
ROUNDS = 8


def processes(words: str, work: Path) -> list[int]:
    """Processes with `words` in their command line that agents have started in a folder below `work`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = os.readlink(process / "cwd").startswith(f"{work}/nicps-")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if inside and words in command:
                found.append(int(process.name))
    return found


def maps_torch(pid: int) -> bool:
    """Whether the process has PyTorch's library in its memory."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def joined(lab: Lab, folder: Path, program: Path) -> list[AgentProcess]:
    """Agents on all hosts; the last one's training program is `program`."""
    agents = []
    for host in lab.hosts:
        last = host.number == len(lab.hosts)
        arguments = ["--trainer", f"{sys.executable} {program}"] if last else []
        folders = replace(Folders.below(folder / host.name), work=folder)
        agents.append(start_agent(lab, host, folders, *arguments))
    await_agents(agents)
    return agents


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with Lab(LabSettings(name=fresh_name(), hosts=request.param)) as lab:
        yield lab


def refusal(agent: AgentProcess, **message: Any) -> str:
    """The agent's answer to a message that it refuses."""
    channel = agent.connect()
    with contextlib.closing(channel):
        channel.send(message)
        answer, _ = channel.recv(10.0)
    assert answer["op"] == "error"
    return str(answer["message"])


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("lab", [4], indirect=True)
def test_takes_part_without_torch(lab: Lab, open_path: Path) -> None:
    agents = joined(lab, open_path, PROGRAM)
    attach = {"op": "attach", "form": "json"}
    assert refusal(agents[3], **attach).startswith("no job is under way")
    assert "version 2" in refusal(agents[3], **attach, version=2)
    # Micro-batches that last make the rounds long enough to look at the processes meanwhile.
    settings = {"rounds": ROUNDS, "test_every": 4, "quorum": 1.0, "microbatch_seconds": 0.02}
    channel = agents[0].submit(JOB, settings=settings)
    until(
        lambda: agents[0].status()["round"] and agents[0].status()["phase"] == "train", "training"
    )
    (program,) = processes(PROGRAM.name, open_path)
    (gateway,) = until(lambda: processes("-m nicps.gateway", open_path), "the gateway runs")
    trainers = processes("-m trainer run", open_path)
    assert not maps_torch(program)
    assert not maps_torch(gateway)
    assert [maps_torch(pid) for pid in trainers] == [True] * 3
    assert refusal(agents[3], **attach) == "a training program is attached already"
    assert refusal(agents[0], **attach) == "a training program is attached already"
    result, _ = await_result(channel, 60.0)
    channel.close()

    assert result["weights_identical"]
    assert result["hosts"] == 4
    assert result["rounds"] == ROUNDS
    folder = Path(result["report"]).parent
    mine = rows(folder / "h4")
    training = [row for row in mine if row["phase"] == "train"]
    assert len(training) == ROUNDS
    for row in training:
        assert row["samples"] == 128
        assert row["counted"] == {"1": 32, "2": 32, "3": 32, "4": 32}
    for name in ("h1", "h2", "h3"):
        others = rows(folder / name)
        assert [row["weights_sha256"] for row in others] == [row["weights_sha256"] for row in mine]
    assert len({row["weights_sha256"] for row in training}) == ROUNDS
    kept = Path("checkpoint") / "h4.residual.npz"  # which the gateway has written
    with np.load(open_path / "h4" / "runs" / result["job_id"] / kept) as archive:
        head, residual = json.loads(archive["residual.json"]), archive["residual"]
    assert head["round"] == training[-1]["round"] and head["lanes"] == len(residual)
    assert residual.any()
    until(lambda: not processes("", open_path), "what the agents have started has ended")


@pytest.mark.parametrize("lab", [2], indirect=True)
def test_a_gradient_that_does_not_fit_fails_the_job(lab: Lab, open_path: Path) -> None:
    """With the parameter's name, at the host that submitted."""
    program = open_path / "wrong_shape.py"
    text = PROGRAM.read_text()
    right = '"shape": list(array.shape),'
    assert text.count(right) == 1
    program.write_text(text.replace(right, '"shape": [*array.shape, 1],'))
    agents = joined(lab, open_path, program)
    channel = agents[0].submit(JOB, settings={"rounds": ROUNDS})
    with pytest.raises(
        JobFailed, match=r"^h2: round \d+: the gradient is refused: parameter"
    ) as failed:
        await_result(channel, 60.0)
    channel.close()
    misfit = "parameter '1.weight': shape is [32, 64, 1], the model's is [32, 64]"
    # The program ends by itself, too: its log is named if that is seen before the answer.
    reason = str(failed.value).partition("; its log: ")[0]
    assert reason.endswith(f"the gradient is refused: {misfit}")
    until(lambda: agents[1].status()["job"] is None, "h2 stands by")
    until(lambda: not processes("", open_path), "what the agents have started has ended")
