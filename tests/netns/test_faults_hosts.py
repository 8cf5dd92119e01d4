# SPDX-License-Identifier: Apache-2.0
"""Hosts that die, stand still, or lose their training program; with a key (docs/faults.md).

After every scene all train again, in one view, with the same state and exact sums in every round.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nicps import wire
from nicps.auth import Sequences
from nicps.dataplane import bpf
from nicps.lab.errors import LabProblem
from tests.netns.labs import raw_socket
from tests.netns.scenes import Drill, Stage

_ETH_P_ALL = 3  # its own frames too
_SO_RCVBUFFORCE = 33


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(4, keyed=True)) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Four hosts that train."""
    made.ready()
    return made


def numbers(stage: Stage, host: str) -> np.ndarray:
    """The agent's own counter of the frames that it has signed in this view, in the kernel."""
    for info in Path(f"/proc/{stage.agent(host).pid}/fdinfo").iterdir():
        for ident in re.findall(r"^map_id:\s+(\d+)", info.read_text(), re.MULTILINE):
            fd = bpf.map_by_id(int(ident))
            try:
                if bpf.map_info(fd).name == "outgoing":
                    return np.frombuffer(bpf.map_memory(fd), np.uint64, 1)
            finally:
                os.close(fd)
    raise AssertionError(f"{host} signs nothing")


@pytest.mark.long
@pytest.mark.parametrize("who", ["lead", "another"])
def test_a_key_has_served_its_time(drill: Drill, who: str) -> None:
    """The same members go on in a new view, whose keys begin with 1 again."""
    lead = drill.lead()
    host = lead if who == "lead" else drill.others(lead)[0]
    view = drill.status(host)["view"]
    signed = numbers(drill.stage, host)
    signed[0] = Sequences.NUMBERS
    drill.until(
        lambda: all(drill.status(name)["view"] > view for name in drill.stage.names), "a new view"
    )
    drill.all_train()
    assert drill.lead() == lead and drill.status(host)["view"] == view + 1
    assert 0 < int(signed[0]) < Sequences.NUMBERS
    assert drill.exact() > 3


@pytest.mark.parametrize("part", [pytest.param("agent", marks=pytest.mark.long), "both"])
def test_a_host_is_killed_and_joins_again(drill: Drill, part: str) -> None:
    stage = drill.stage
    stage.lab.kill("h3", part)  # type: ignore[arg-type]
    drill.goes_on(*drill.others("h3"))
    stage.end("h3", signal.SIGKILL)
    stage.nothing_left("h3", work=False)
    stage.join("h3")
    drill.all_train(60.0)
    assert drill.exact() > 6


@pytest.mark.long
def test_old_frames_are_sent_again(drill: Drill) -> None:
    """A stranger has recorded how a host came back: calls, answers and lists. Sent again, they change no view."""
    stage, rest = drill.stage, drill.others("h4")
    recorded: list[bytes] = []
    kinds = {wire.FrameType.CALL, wire.FrameType.ANSWER, wire.FrameType.VIEW}
    at = wire.ETHERNET_BYTES + 1
    ours = wire.ETHERTYPE.to_bytes(2, "big")

    def come_back() -> None:
        stage.end("h4", signal.SIGKILL)
        drill.goes_on(*rest)
        stage.join("h4")
        drill.all_train(60.0)

    with raw_socket(stage.lab.host("h4"), _ETH_P_ALL) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        stranger.setblocking(False)
        come_back()
        with contextlib.suppress(BlockingIOError):
            while True:
                recorded.append(stranger.recv(2048))
        recorded = [frame for frame in recorded if frame[12:14] == ours and frame[at] in kinds]
        assert {frame[at] for frame in recorded} == kinds
        stage.end("h4", signal.SIGKILL)
        drill.goes_on(*rest)
        view = drill.status(rest[0])["view"]
        for _ in range(3):
            for frame in recorded:
                stranger.send(frame)
            drill.goes_on(*rest, rounds=10)
    assert {drill.status(name)["view"] for name in rest} == {view}
    come_back()
    drill.exact()


def test_a_training_program_is_killed(drill: Drill) -> None:
    """Its agent leaves in time, starts another one, and comes back with it."""
    drill.stage.lab.kill("h2", "trainer")
    drill.goes_on(*drill.others("h2"))
    drill.all_train(60.0)
    assert "the training program ended: SIGKILL has ended it" in drill.stage.log("h2")
    drill.exact()


def test_a_training_program_that_is_always_killed(drill: Drill) -> None:
    """Its host trains no more until a user acts; for all others nothing ends."""
    stage, rest = drill.stage, drill.others("h2")

    def no_more_part() -> bool:
        with contextlib.suppress(LabProblem):  # there is none at the moment
            stage.lab.kill("h2", "trainer")
        return "stood still, 4 times in a row" in stage.log("h2")

    drill.until(no_more_part, "the agent gives up", 60.0)
    drill.goes_on(*rest, rounds=10)
    stage.end("h2", signal.SIGTERM)
    stage.join("h2")
    drill.all_train(60.0)
    drill.exact()


def test_an_agent_is_stopped_for_10_s(drill: Drill) -> None:
    """It does not know that it was away: it learns of it, stands by, and is taken back."""
    drill.stage.lab.pause("h4", "agent")
    try:
        drill.goes_on(*drill.others("h4"))
        time.sleep(10.0)  # the scene needs this pause
    finally:
        drill.stage.lab.resume("h4", "agent")
    drill.all_train(60.0)
    assert "standing by: it was not heard, and the others have gone on" in drill.stage.log("h4")
    drill.exact()


def test_a_host_stands_still(drill: Drill) -> None:
    drill.stage.lab.pause("h3")
    try:
        drill.goes_on(*drill.others("h3"))
    finally:
        drill.stage.lab.resume("h3")
    drill.all_train(60.0)
    drill.exact()


@pytest.mark.long
def test_the_lead_is_killed_and_joins_again(drill: Drill) -> None:
    stage, lead = drill.stage, drill.lead()
    stage.lab.kill(lead)
    rest = drill.others(lead)
    drill.goes_on(*rest)
    assert drill.lead() == min(rest, key=drill.number)
    stage.end(lead, signal.SIGKILL)
    stage.join(lead)
    drill.all_train(60.0)
    assert drill.lead() != lead  # a host that comes back does not take the lead again
    drill.exact()


@pytest.mark.long
def test_a_host_leaves_and_joins_again(drill: Drill) -> None:
    """`nicps leave`; the last scene here shows that no member waits for it."""
    stage = drill.stage
    process = stage.agents["h3"].process
    assert stage.command("h3", "leave").code == 0
    assert process.wait(10.0) == 0
    drill.goes_on(*drill.others("h3"))
    stage.agents.pop("h3")
    stage.nothing_left("h3")
    stage.join("h3")
    drill.all_train(60.0)
    drill.exact()


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    run = drill.end()
    assert run.result["rounds"] > 20
    for host in drill.stage.names:
        status = drill.status(host)
        assert status["keyed"] and status["trouble"] == ""


def test_who_leaves_is_not_waited_for() -> None:
    """`nicps leave` while no host would be missed in less than a minute: it sends LEAVE."""
    with Drill(Stage(3, keyed=True, arguments=("--silence", "60"))) as drill:
        stage = drill.stage
        drill.begin()
        assert stage.command("h3", "leave").code == 0
        drill.goes_on("h1", "h2", timeout_s=30.0)
        assert "not in it: h3" in stage.log("h1")
        drill.exact()


@pytest.mark.long
def test_a_submitter_that_missed_the_end_hears_of_it(made: Drill) -> None:
    """It stands still until the others are done; its user is told which host has the result."""
    drill, rest = made, made.others("h4")
    drill.begin("h4")
    drill.stage.lab.pause("h4")
    drill.goes_on(*rest)
    lead = drill.end(*rest).members[0]
    drill.stage.lab.resume("h4")

    def knows() -> bool:
        status = drill.status("h4")
        return status["job"] is None and not status["trouble"]

    drill.until(knows, "it hears of the end")
    last = drill.status("h4")["last_job"]
    assert last["error"] is None and last["result"] == {"job_id": drill.job_id, "lead": lead}
