# SPDX-License-Identifier: Apache-2.0
"""Groups of programs that agents did not start: real agents, real kernels, against NumPy (docs/collective.md)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.netns.labs import until
from tests.netns.members import Network, tiny_job

PROGRAM = [sys.executable, "-m", "tests.netns.group_program"]


class Member:
    """A program on a host, and what it says."""

    def __init__(self, network: Network, host: str, settings: dict[str, Any]) -> None:
        argv = [*PROGRAM, orjson.dumps(settings).decode()]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.host, self.process = host, network.run(host, argv, text=True, **pipes)

    def first(self) -> dict[str, Any]:
        """The first thing that it says."""
        assert self.process.stdout is not None
        found: dict[str, Any] = orjson.loads(self.process.stdout.readline())
        return found

    def ended(self, timeout_s: float = 90.0) -> list[dict[str, Any]]:
        """All (the rest) that it says until its end."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"{self.host} has not ended: {out[-2000:]} {err}") from None
        assert "Traceback" not in err, err
        return [orjson.loads(line) for line in out.splitlines()]


def start(network: Network, hosts: list[str] | None = None, **settings: Any) -> list[Member]:
    return [Member(network, host, settings) for host in hosts or network.names]


def finish(members: list[Member], timeout_s: float = 90.0) -> list[list[dict[str, Any]]]:
    return [member.ended(timeout_s) for member in members]


def same_results(ended: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All members say the same of each call."""
    calls = [[line for line in lines if "call" in line] for lines in ended]
    assert all(each == calls[0] for each in calls)
    return calls[0]


def test_drawn_calls_with_real_agents(three: Network) -> None:
    """Of all kinds, types and lengths; each result is checked against NumPy by every member."""
    ended = finish(start(three, size=3, calls=80, seed=5))
    assert sorted(lines[0]["formed"] for lines in ended) == [0, 1, 2]
    assert {tuple(lines[0]["names"]) for lines in ended} == {tuple(ended[0][0]["names"])}
    assert len(same_results(ended)) == 80
    assert all(lines[-1] == {"closed": True, "lost": []} for lines in ended)
    three.all_stand_by()
    three.work_is_clear("h1")


@pytest.mark.long
def test_a_call_of_many_rounds(three: Network) -> None:
    """Up to 9 million numbers: four rounds or so each."""
    ended = finish(start(three, size=3, calls=6, seed=8, most=9_000_000))
    assert len(same_results(ended)) == 6


def test_one_group_after_the_other_and_a_job_after_that(three: Network, open_path: Any) -> None:
    """Programs that come late are waited for; ranks are those that they say."""
    for name in ("first", "second"):
        members = [
            Member(three, host, {"size": 3, "name": name, "rank": rank, "late_s": rank * 0.3})
            for rank, host in enumerate(("h3", "h1", "h2"))
        ]
        ended = finish(members)
        assert [lines[0]["formed"] for lines in ended] == [0, 1, 2]
        assert ended[0][0]["names"] == ["h3", "h1", "h2"]
    three.all_stand_by()
    run = three.train(tiny_job(open_path), rounds=3)
    assert run.result["weights_identical"]


def test_all_hosts_of_the_network(three: Network) -> None:
    """Without a size: a host whose program is not there yet is waited for."""
    late = [Member(three, "h3", {"calls": 5, "late_s": 2.0})]
    ended = finish(start(three, ["h1", "h2"], calls=5) + late)
    assert len(ended[0][0]["names"]) == 3 and len(same_results(ended)) == 5


def test_members_that_call_different_things(three: Network) -> None:
    ended = finish(start(three, size=3, differs=True))
    names = {lines[0]["formed"]: host for host, lines in zip(three.names, ended, strict=True)}
    text = (
        f"the members have called different things: {names[0]} (rank 0), {names[2]} (rank 2):"
        f" all_reduce(sum) of 1,000 float32; {names[1]} (rank 1): barrier"
    )
    assert [lines[1] for lines in ended] == [{"differs": text}] * 3
    assert all(lines[-1]["closed"] for lines in ended)


@pytest.mark.long
def test_a_member_that_is_killed_in_the_middle(three: Network) -> None:
    """The others' calls go on without it, and all that is left comes to the same; close is among those left."""
    members = start(three, size=3, calls=60, seed=11, dies={"1": 20})
    ended = finish(members)
    codes = [member.process.returncode for member in members]
    assert sorted(codes) == [-signal.SIGKILL, 0, 0]
    left = [lines for lines, code in zip(ended, codes, strict=True) if code == 0]
    calls = same_results(left)
    assert len(calls) == 60 and calls[19]["counted"] == [0, 1, 2]
    without = [call for call in calls[21:] if "lost" not in call]
    assert len(without) > 20 and all(call["counted"] == [0, 2] for call in without)
    assert any("lost" in call for call in calls[21:])
    assert all(lines[-1] == {"closed": True, "lost": [1]} for lines in left)
    three.all_stand_by()


def test_programs_that_are_all_killed(three: Network) -> None:
    """One after the other, before any of them is heard to have gone: nothing is left of the group."""
    members = start(three, size=3, waits=True)
    for member in members:
        assert "formed" in member.first() and member.first() == {"waited": True}
    for member in members:
        member.process.kill()
    for member in members:
        member.process.wait()
    three.all_stand_by()


@pytest.mark.long
def test_a_host_whose_agent_is_killed(three: Network) -> None:
    """Its program is told; the calls of the others go on."""
    members = start(three, size=3, calls=400, seed=3, most=500)
    assert {member.first()["formed"] for member in members} == {0, 1, 2}
    gone = members[2]
    until(lambda: (three.status(gone.host) or {}).get("round", 0) > 20, "rounds")
    three.end(gone.host, signal.SIGKILL)
    lost = gone.ended()[-1]
    assert lost["kind"] == "GroupClosed" and "the agent has gone" in lost["error"]
    calls = same_results(finish(members[:2]))
    assert len(calls) == 400 and len(calls[0]["counted"]) == 3
    assert len([call for call in calls if len(call.get("counted", [])) == 2]) > 20
    three.ready()


def test_the_agent_that_leads_a_group_of_two_is_killed(three: Network) -> None:
    """Without it there is no majority: the other program is told, and its host is free for the next group."""
    members = start(three, ["h2", "h3"], size=2, waits=True, name="one")
    ranks = [member.first()["formed"] for member in members]
    assert [member.first() for member in members] == [{"waited": True}] * 2
    lead, other = members[ranks.index(0)], members[ranks.index(1)]
    three.end(lead.host, signal.SIGKILL)
    three.join(lead.host)
    three.all_stand_by(lead.host, other.host)
    for member in members:
        member.process.kill()
        member.process.wait()
    ended = finish(start(three, ["h2", "h3"], size=2, calls=3, name="two"))
    assert len(same_results(ended)) == 3


def test_a_group_that_does_not_form(three: Network) -> None:
    """It says who was found; nothing is left of it, and the next one forms."""
    ended = finish(start(three, ["h1", "h2"], size=3, forming_s=2.0))
    for lines in ended:
        assert lines[-1]["kind"] == "NetworkProblem"
        assert lines[-1]["error"].startswith("group 'default' of 3 hosts has not formed within 2 s")
    assert any("found h1, h2" in lines[-1]["error"] for lines in ended)
    three.all_stand_by()
    ended = finish(start(three, ["h1", "h2"], size=2, calls=3))
    assert len(same_results(ended)) == 3


def test_a_member_that_does_not_call(three: Network) -> None:
    """The others give up after the group's own time-out, with one line."""
    members = [
        Member(three, host, {"size": 3, "calls": calls, "timeout_s": 2.0, "sleeps": host == "h3"})
        for host, calls in (("h1", 6), ("h2", 6), ("h3", 4))
    ]
    told = [member.ended()[-1] for member in members[:2]]
    text = "not all members have made this call in time: the group is closed at this host"
    assert {"error": text, "kind": "CallTimeout"} in told
    for said in told:  # who has given up first has left the other alone with h3
        assert said["kind"] in ("CallTimeout", "GroupClosed"), said
    members[2].process.kill()
    members[2].process.wait()
    three.all_stand_by()
    ended = finish(
        start(three, size=3, calls=2)
    )  # at once, also on the host that had begun the other
    assert len(same_results(ended)) == 2


@pytest.mark.long
def test_while_a_job_is_under_way(three: Network, open_path: Any) -> None:
    channel = three.submit("h1", tiny_job(open_path), rounds=100_000)
    try:
        three.in_training()
        said = start(three, ["h2"], size=2, forming_s=5.0)[0].ended()[-1]
        assert said["kind"] == "NetworkProblem" and "a job" in said["error"]
        assert three.command("h1", "cancel").code == 0
        three.all_stand_by()
    finally:
        channel.close()


@pytest.fixture
def lossy() -> Iterator[Network]:
    with Network(3, loss=0.01) as made:
        made.up()
        yield made


@pytest.mark.long
def test_frames_are_lost_and_so_is_a_member(lossy: Network) -> None:
    """A hundredth of all frames, and one program in the middle."""
    members = start(lossy, size=3, calls=60, seed=21, dies={"2": 30}, most=60_000)
    ended = finish(members)
    left = [line for line, m in zip(ended, members, strict=True) if m.process.returncode == 0]
    assert len(left) == 2 and len(same_results(left)) == 60
