# SPDX-License-Identifier: Apache-2.0
"""The lab cut into halves, its cables pulled; what stays of faults from one command to the next."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from nicps.errors import NicpsError, UsageProblem
from nicps.lab import Faults, Lab, LabNotFound, LabSettings, state
from tests.netns.labs import leftovers, nicps, own_links, until
from tests.netns.traffic import mac_bytes, numbered, traffic
from tests.reaper import fresh_name

pytestmark = pytest.mark.xdp

HOSTS = ("h1", "h2", "h3", "h4")


@pytest.fixture
def name() -> Iterator[str]:
    """A lab's name; no part of that lab may be left after the test."""
    links_before = own_links()
    chosen = fresh_name()
    yield chosen
    assert leftovers(chosen) == {}
    assert own_links() <= links_before


@pytest.fixture
def lab(name: str) -> Iterator[Lab]:
    """Four hosts."""
    with Lab(LabSettings(name, hosts=4)) as made:
        yield made


def severed(lab: Lab) -> int:
    return sum(port.to_host.severed for port in lab.counters().values())


def hearing(lab: Lab) -> set[str]:
    """The hosts that hear each other's broadcasts, as `hearer<speaker`."""
    before = severed(lab)
    with traffic(lab) as net:
        for number, host in enumerate(HOSTS, 1):
            net.send(host, [number])

        def complete() -> bool:
            net.listen()
            return sum(map(len, net.heard.values())) + severed(lab) - before == 12

        until(complete, "each broadcast has been heard or severed at three ports")
        return {f"{host}<h{number}" for host in HOSTS for number in net.numbers(host)}


EVERYBODY = {f"{a}<{b}" for a in HOSTS for b in HOSTS if a != b}
HALVES = {"h1<h2", "h2<h1", "h3<h4", "h4<h3"}


def test_a_cut_makes_halves_until_it_is_healed(lab: Lab) -> None:
    assert hearing(lab) == EVERYBODY
    lab.cut("h1,h2")
    assert hearing(lab) == HALVES
    lab.cut("h4")
    assert hearing(lab) == {"h1<h2", "h2<h1"}, "cuts add up"
    lab.clear()
    assert hearing(lab) == {"h1<h2", "h2<h1"}, "other faults are another matter"
    lab.heal()
    assert hearing(lab) == EVERYBODY


def test_a_cut_severs_late_frames_and_single_receivers_too(lab: Lab) -> None:
    lab.fault("h1", delay_ms=5)
    lab.cut("h1,h2")
    assert hearing(lab) == HALVES
    second, fourth = (mac_bytes(lab.host(name).mac) for name in ("h2", "h4"))
    before = severed(lab)
    with traffic(lab) as net:
        # The switch has learned where both are: each frame goes to one port.
        net.sockets["h1"].send(numbered(lab.hosts[0].mac, 1, second))
        net.sockets["h1"].send(numbered(lab.hosts[0].mac, 2, fourth))

        def complete() -> bool:
            net.listen()
            return net.numbers("h2") == [1] and severed(lab) == before + 1

        until(complete, "h2 has its frame, and h4's is severed")
        assert net.numbers("h4") == []


def test_a_cut_needs_two_sides(lab: Lab) -> None:
    for hosts in ("all", "h4,h3,h2,h1"):
        with pytest.raises(UsageProblem, match="both sides"):
            lab.cut(hosts)
    with pytest.raises(LabNotFound, match="no host 'h5'"):
        lab.cut("h1,h5")
    assert {told.side for told in lab.faults().values()} == {0}


def test_only_what_is_named_changes(lab: Lab) -> None:
    lab.fault("h1,h3", loss=0.02, delay_ms=3)
    lab.fault("h1", loss=0.0, corrupt=0.01)
    lab.cut("h1")
    told = lab.faults()
    assert told["h1"].faults == Faults(corrupt=0.01, delay_ms=3.0)
    assert told["h2"].faults == Faults()
    assert told["h3"].faults == Faults(loss=0.02, delay_ms=3.0)
    lab.clear("h1")
    assert (lab.faults()["h1"].faults, lab.faults()["h1"].side) == (Faults(), 1)
    assert lab.faults()["h3"].faults == Faults(loss=0.02, delay_ms=3.0)


def test_the_loss_that_a_lab_was_made_with_is_a_fault_like_any(name: str) -> None:
    with Lab(LabSettings(name, hosts=2, loss=0.25)) as lab:
        assert {told.faults for told in lab.faults().values()} == {Faults(loss=0.25)}
        lab.clear()
        assert {told.faults for told in lab.faults().values()} == {Faults()}


@pytest.mark.parametrize(
    "wrong", [{"loss": 1.5}, {"corrupt": -0.1}, {"delay_ms": -1.0}, {"delay_ms": 1e6}]
)
def test_what_cannot_be_is_refused(lab: Lab, wrong: dict[str, float]) -> None:
    with pytest.raises(UsageProblem):
        lab.fault("h1", **wrong)
    found = state.read(lab.name)
    assert found is not None and found.faults_map is None, "nothing was loaded for it"


def test_commands(name: str) -> None:
    def lab(*arguments: str, code: int = 0) -> str:
        done = nicps("lab", arguments[0], "--lab", name, *arguments[1:])
        assert done.returncode == code, done.stderr
        if code:
            assert done.stdout == ""
            assert done.stderr.startswith("nicps: error: ") and done.stderr.count("\n") == 1
        return done.stderr if code else done.stdout

    lab("up", "--hosts", "3")
    try:
        lab("fault", "h1", "--loss", "5%", "--duplicate", "0.01", "--corrupt", "1%")
        lab("fault", "h1", "--reorder", "2%", "--delay", "3.5")
        text = lab("cut", "h1,h2")
        rows = dict(line.split(maxsplit=1) for line in text.splitlines())
        assert rows == {
            "h1": "loss 5%, duplicate 1%, corrupt 1%, reorder 2%, delay 3.5 ms, cut (side 1)",
            "h2": "cut (side 1)",
            "h3": "-",
        }
        assert rows["h1"] in lab("status")
        lab("link", "h2", "down")
        lab("link", "h3", "unplugged")
        (shown,) = json.loads(lab("status", "--json"))["labs"]
        first, second, third = shown["hosts"]
        assert first["faults"] == {
            "loss": 0.05,
            "duplicate": 0.01,
            "corrupt": 0.01,
            "reorder": 0.02,
            "delay_ms": 3.5,
        }
        assert [host["side"] for host in shown["hosts"]] == [1, 1, 0]
        assert (second["up"], second["port"]["up"]) == (False, True)
        assert (third["up"], third["port"]["up"]) == (True, False)
        lab("link", "all", "up")
        lab("heal")
        assert lab("fault", "all", "--clear").split() == ["h1", "-", "h2", "-", "h3", "-"]

        assert "--clear alone" in lab("fault", "h1", code=2)
        assert "--clear alone" in lab("fault", "h1", "--clear", "--loss", "1%", code=2)
        assert "is not a corruption" in lab("fault", "h1", "--corrupt", "much", code=2)
        assert "is not a delay" in lab("fault", "h1", "--delay", "long", code=2)
        assert "0 to 10000" in lab("fault", "h1", "--delay", "10001", code=2)
        assert "both sides" in lab("cut", "all", code=2)
        assert "no host 'h4'" in lab("fault", "h4", "--loss", "1%", code=2)
        assert "no host 'h4'" in lab("cut", "h1,h4", code=2)
        assert "invalid choice" in lab("link", "h1", "sideways", code=2)
    finally:
        lab("down")
    assert "nicps lab up" in lab("heal", code=2)


def test_an_unplugged_cable_takes_the_carrier_and_leaves_the_interface_up(lab: Lab) -> None:
    second = lab.hosts[1]
    lab.link("h2", "unplugged")
    until(lambda: not second.read_link().carrier, "h2 has no carrier")
    assert second.read_link().up
    lab.link("h2", "down")
    assert not second.read_link().up
    lab.link("h2", "up")
    until(lambda: second.read_link().carrier, "h2 has its carrier back")
    assert hearing(lab) == EVERYBODY


def test_no_lab_no_fault(name: str) -> None:
    with pytest.raises(NicpsError, match="nicps lab up"):
        Lab.open(name).fault("h1", loss=0.5)
