# SPDX-License-Identifier: Apache-2.0
"""`nicps top`: the frame that statuses come to, and the command at a terminal and without one."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nicps import cli
from nicps.cli.topframe import Looks, frame, members_of
from nicps.session.activity import (
    Activity,
    ChannelActivity,
    MemberActivity,
    Seconds,
    SlowActivity,
    Traffic,
)
from nicps.session.messages import LastJob, Status
from tests.unit.test_status_cli import MEMBERS, status

COUNTERS = {"added": 0, "stored": 0, "malformed": 7}


def look(
    at: float,
    rounds: int = 0,
    awaited: Sequence[int] = (),
    counters: Mapping[str, int] = COUNTERS,
    **more: Any,
) -> Status:
    """A status after `at` seconds and so many rounds of 0.1 s and 64 samples."""
    of = status(job="run", counters=dict(counters), token_turns=10 * rounds, **more)
    members = tuple(
        MemberActivity(m.number, m.number in awaited, 20 * rounds, 4, 2) for m in of.members
    )
    activity = Activity(
        uptime_s=at,
        exchange="stripes",
        lane="i16",
        rounds=rounds,
        tests=0,
        samples=64 * rounds,
        round_seconds=Seconds((1.0,), (rounds, 0), 0.1 * rounds),
        views=2,
        evictions=1,
        returns=0,
        parked=False,
        frames_sent=100 * rounds,
        fragments_resent=3,
        fragments_asked=4,
        members=members,
        traffic=Traffic(1_000_000 * rounds, 1000 * rounds, 2000 * rounds, 20 * rounds),
    )
    return replace(of, activity=activity)


def shown(looks: Sequence[Status], width: int = 80, height: int = 24) -> list[str]:
    """The frame's lines, without colours."""
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(frame(Looks(looks), height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    return [line.rstrip() for line in text.splitlines()]


def line(lines: Sequence[str], label: str) -> str:
    (found,) = (text for text in lines if text.startswith(f"{label} "))
    return found


def test_rates_are_of_the_looks() -> None:
    lines = shown([look(10.0, 100), look(12.0, 130, counters=COUNTERS | {"added": 600})])
    assert "130" not in line(lines, "state")
    assert "15 rounds/s  960 samples/s  100.0 ms a round" in line(lines, "round")
    assert "150 turns/s here" in line(lines, "token")
    assert "in 15 MB/s 15,000 frames/s, out 30 kB/s 300 frames/s" in line(lines, "interface")
    assert line(lines, "XDP").split()[1:] == ["added", "300/s"]
    assert "3 sent again, 4 asked again" in line(lines, "losses")


def test_the_rounds_of_a_script_have_no_samples() -> None:
    looks = [look(10.0, 100), look(12.0, 130)]
    for at, each in enumerate(looks):
        assert each.activity is not None
        looks[at] = replace(each, activity=replace(each.activity, samples=0))
    found = line(shown(looks), "round")
    assert "15 rounds/s" in found and "samples" not in found
    assert {member.samples for member in members_of(Looks(looks))} == {None}


def test_one_look_has_no_rates() -> None:
    lines = shown([look(10.0, 100)])
    assert "- rounds/s" in line(lines, "round")
    assert "ms a round" not in line(lines, "round")


def test_an_agent_that_was_started_again_counts_from_zero() -> None:
    looks = Looks([look(100.0, 1000), look(1.0, 2), look(2.0, 12)])
    assert looks.rate(lambda _, a: a.rounds) == 10.0


def test_who_is_waited_for() -> None:
    looks = [look(n, n, (3,) if n % 2 else ()) for n in range(1, 4)]
    lines = shown(looks)
    assert line(lines, "waits for") == "waits for   h3  (of the last looks: h3 67%)"
    assert lines[-1].endswith("waited for") and lines[-1].split()[1] == "h3"
    assert [m.awaited for m in members_of(Looks(looks))] == [0.0, 0.0, 2 / 3]
    assert line(shown([look(1.0, 1)]), "waits for") == "waits for   nobody in particular"


def test_who_is_slow() -> None:
    of = look(1.0, 1)
    assert of.activity is not None and not any(text.startswith("slow") for text in shown([of]))
    activity = replace(of.activity, slow=(SlowActivity(0, 0.5, "sums"),))
    found = line(shown([replace(of, activity=activity)]), "slow")
    assert found == "slow        the Linux switch: training waits 50% of the time for its sums"


def test_figures_are_whole_in_eighty_columns() -> None:
    """What has no room is the text at the line's end."""
    named = [{**MEMBERS[0], "self": True}, *MEMBERS[1:]]
    lines = shown([look(1.0, 1, (1,), members=named)])
    head, first = lines[-4].split(), lines[-3]
    assert head == ["no", "name", "state", "samples/s", "waited", "asked", "resent"]
    assert first.split()[:7] == ["1", "h1", "train", "-", "100%", "4", "2"]
    assert "  waited for, lead" in first


def test_a_member_that_has_left() -> None:
    left = [{**MEMBERS[0], "state": "left"}, *MEMBERS[1:]]
    lines = shown([look(1.0, 1, members=left)])
    assert "2 of 3 members" in line(lines, "state")
    assert lines[-3].split()[:3] == ["1", "h1", "evicted"]


def test_pushes_to_servers() -> None:
    """Rounds are seldom there, and members are servers or workers."""
    served = [{**MEMBERS[0], "role": "server"}, *({**m, "role": "worker"} for m in MEMBERS[1:])]
    looks = [look(at, 1, members=served) for at in (1.0, 2.0)]
    assert looks[1].activity is not None
    looks[1] = replace(looks[1], activity=replace(looks[1].activity, pushes=12, samples=64 + 600))
    lines = shown(looks, 100)
    assert "0.0 rounds/s  12 pushes/s here  600 samples/s" in line(lines, "round")
    assert [text.split()[-1] for text in lines[-3:]] == ["server", "worker", "worker"]
    assert "pushes" not in line(shown([look(1.0, 1)]), "round")


@pytest.mark.parametrize("job_id", ["", "run-1"])
def test_a_long_text_is_cut_and_labels_are_not(job_id: str) -> None:
    of = replace(look(1.0), job=None, last_job=LastJob(job_id, "setting " * 40, {}))
    lines = shown([of], 100)
    told = line(lines, "job")
    assert told.startswith(f"job         none; the last one{', run-1' * bool(job_id)}")
    assert (" was refused: setting" in told) == (not job_id) and told.endswith("…")
    assert line(lines, "state") and line(lines, "nicps sent") and line(lines, "interface")


def test_what_the_training_program_reports() -> None:
    told = {"trained_rounds": 7, "rounds_total": 9, "loss": 0.25, "accuracy": 0.5, "other": [1]}
    lines = shown([look(1.0, 7, progress=told)])
    assert line(lines, "round").startswith("round       7 of 9")
    assert line(lines, "training") == "training    loss 0.2500  accuracy 50.00%"


def channel(number: int, rounds: int, *awaits: int, state: str = "sums") -> ChannelActivity:
    """A channel of three rounds of 1,000 bytes a step."""
    return ChannelActivity(
        number=number,
        urgency=number,
        step=5,
        round=17,
        place=1,
        places=3,
        state=state,
        awaits=awaits,
        rounds=rounds,
        bytes=1000 * rounds,
    )


def test_channels_are_named_the_most_urgent_one_first() -> None:
    """Rates are of the looks that have the channel; a member that is often waited for is named with its part."""
    looks = [look(at, at) for at in range(5)]
    for at in (1, 2, 3, 4):
        activity = looks[at].activity
        assert activity is not None
        late = (3,) if at > 2 else ()
        channels = channel(0, 100 + 4 * at, 2, state="open"), channel(1, 900 + 20 * at, *late)
        looks[at] = replace(looks[at], activity=replace(activity, channels=channels))
    lines = shown(looks)
    one = line(lines, "channel 1")
    assert one == "channel 1   urgency 1  sums     round 2 of 3  20/s  20 kB/s  waits for h3 50%"
    bulk = line(lines, "channel 0")
    assert bulk == "channel 0   urgency 0  open     round 2 of 3  4.0/s  4 kB/s  waits for h2 100%"
    assert lines.index(one) < lines.index(bulk)
    assert not any(text.startswith("channel") for text in shown([look(1.0, 1)]))


def test_a_step_of_a_plan() -> None:
    told = {"step_seconds": 0.5581, "wait_seconds": 0.12, "predicted_seconds": None}
    lines = shown([look(1.0, 7, progress=told)])
    assert line(lines, "a step") == "a step      took 0.558 s  waiting 0.120 s"


def test_without_a_job() -> None:
    idle = replace(look(1.0), job=None, state="standby", members=(), trouble="h1 is not heard")
    lines = shown([idle])
    assert line(lines, "job") == "job         none"
    assert line(lines, "trouble") == "trouble     h1 is not heard"
    assert not any(text.startswith(("round", "waits for", " 1 ")) for text in lines)


def test_a_job_that_is_being_prepared() -> None:
    of = look(0.0, 0)
    assert of.activity is not None
    activity = replace(of.activity, preparing="/home/ann/digits")
    lines = shown([replace(of, job=None, activity=activity)])
    assert line(lines, "preparing") == "preparing   /home/ann/digits"
    assert not any(text.startswith("job") for text in lines)


def test_a_list_that_is_longer_than_the_terminal() -> None:
    many = [
        {"number": n, "name": f"host-{n}", "mac": "", "state": "train", "self": n == 1}
        for n in range(1, 65)
    ]
    lines = shown([look(1.0, 1, members=many)])
    assert len(lines) <= 24
    assert lines[-1].strip() == f"and {64 - int(lines[-2].split()[0])} more"
    assert len(shown([look(1.0, 1, members=many)], 200, 100)) > 64


def test_names_cannot_move_the_cursor() -> None:
    named = [{**MEMBERS[0], "name": "h\x1b[2J[bold]1"}, *MEMBERS[1:]]
    assert any("h?[2J[bold]1" in text for text in shown([look(1.0, 1, members=named)]))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = shown([look(1.0, 1), look(2.0, 50)], width)
    assert max(map(len, lines)) <= width
    assert len(lines) == len(shown([look(1.0, 1), look(2.0, 50)], 200))


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1000"])
def test_an_interval_that_cannot_be(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", f"--interval={seconds}"]) == 2
    assert capsys.readouterr().err.startswith("nicps: error: --interval takes 0.1 to 60 seconds")


def test_without_an_agent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["top", "--once", "--socket", str(tmp_path / "none")]) == 4
    text = capsys.readouterr().err
    assert "nicps join" in text and text.count("\n") == 1


# ---- at a terminal, with something that answers as an agent does

AGENT = """
import sys
from pathlib import Path
from nicps.session.channel import Channel
from nicps.session.fields import encode
from tests.unit.test_top_cli import look
import socket, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
channel = Channel(listener.accept()[0])
for n in range(1, int(sys.argv[2])):
    channel.recv()
    channel.send(encode(look(n, n)))
"""


class Terminal:
    """`nicps top` at a pseudo-terminal, beside an agent that answers so often."""

    def __init__(self, folder: Path, answers: int, **environment: str) -> None:
        path = folder / "socket"
        self.agent = subprocess.Popen([sys.executable, "-c", AGENT, str(path), str(answers)])
        deadline = time.monotonic() + 60
        while not path.exists():
            assert self.agent.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.top = subprocess.Popen(
            [sys.executable, "-m", "nicps", "top", "--socket", str(path), "--interval", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", **environment},
        )
        self.slave, self.text = slave, b""

    def read_until(self, wanted: bytes) -> None:
        deadline = time.monotonic() + 60
        while wanted not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 1 << 16)

    def ended(self) -> tuple[int, str]:
        """The exit code and what it said; the terminal is as it was."""
        _, error = self.top.communicate(timeout=60)
        assert termios.tcgetattr(self.slave) == self.before
        self.read_until(b"\x1b[?1049l")  # the screen that was there is shown again
        return self.top.returncode, error.decode()

    def close(self) -> None:
        for process in (self.top, self.agent):
            process.kill()
            process.wait()
        os.close(self.master)
        os.close(self.slave)


def test_a_key_ends_it(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, 1000)
    try:
        terminal.read_until(b"rounds/s")
        os.write(terminal.master, b"xq")
        assert terminal.ended() == (0, "")
    finally:
        terminal.close()


def test_a_signal_ends_it_and_no_color_is_heard(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, 1000, NO_COLOR="1")
    try:
        terminal.read_until(b"rounds/s")
        assert b"\x1b[36m" not in terminal.text
        terminal.top.send_signal(signal.SIGTERM)
        assert terminal.ended() == (128 + signal.SIGTERM, "")
    finally:
        terminal.close()


def test_an_agent_that_goes_away(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, 3)
    try:
        terminal.read_until(b"rounds/s")
        assert terminal.agent.wait(60) == 0
        code, error = terminal.ended()
        assert code == 4
        assert error.startswith("nicps: error: the agent of this host has gone")
        assert error.count("\n") == 1
    finally:
        terminal.close()
