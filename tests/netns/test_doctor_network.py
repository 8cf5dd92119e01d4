# SPDX-License-Identifier: Apache-2.0
"""`nicps doctor --network` between agents that stand by, at a switch that is good and at one that is not."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nicps.dataplane import bpf
from nicps.lab import links, namespaces
from tests.netns.labs import NICPS, until
from tests.netns.members import Network, tiny_job
from tests.netns.wires import run


def measured(network: Network, host: str = "h1", seconds: str = "0.2") -> dict[str, Any]:
    """The output of the command, for programs."""
    ended = network.command(host, "doctor", "--network", "--json", "--seconds", seconds)
    assert ended.code in (0, 4), ended.err
    report = json.loads(ended.out)
    assert ended.code == (0 if report["ok"] else 4)
    return dict(report)


def said(report: dict[str, Any]) -> list[str]:
    """What was found; round trips are no good where a machine is all of the LAN and has other things to do."""
    return [f["found"] for f in report["findings"] if "round trip" not in f["found"]]


@contextmanager
def at_the_switch(network: Network, command: str, undo: str) -> Iterator[None]:
    """A command in the switch's namespace, taken back at the end."""
    switch = namespaces.switch_name(network.lab.name)
    namespaces.inside(switch, lambda: run(command))
    try:
        yield
    finally:
        namespaces.inside(switch, lambda: run(undo))


def test_a_good_lan(network: Network) -> None:
    before = {host: network.agents[host].status()["counters"] for host in network.names}
    report = measured(network)
    assert said(report) == []
    assert [host["name"] for host in report["hosts"]] == ["h2", "h3", "h4"]
    sent = [train["sent"] for train in report["trains"]]
    assert sent[0] > 20 < sent[-1]
    for host in report["hosts"]:
        assert [train["received"] for train in host["trains"]] == sent
        assert host["round_trip_us"]["min"] <= host["round_trip_us"]["median"] < 1e6
        after = network.agents[host["name"]].status()["counters"]
        probed = sum(sent) + report["tagged"]
        assert after["probed"] - before[host["name"]]["probed"] == probed, "in the kernel"
        assert after["control"] - before[host["name"]]["control"] < 400, "only questions go up"
    ended = network.command("h3", "doctor", "--network", "--seconds", "0.05")
    assert [line.split()[0] for line in ended.out.splitlines()[2:5]] == ["h1", "h2", "h4"]


def test_where_tags_arrive(network: Network) -> None:
    """The port of h2 leaves them in the frames. A bridge has taken them out, and other ports do not put them back."""
    switch = namespaces.switch_name(network.lab.name)
    namespaces.inside(switch, lambda: links.keep_tags("p2"))
    report = measured(network)
    sent = report["tagged"]
    assert sent > 20
    assert [host["tags"] for host in report["hosts"]] == [
        {"received": sent, "tagged": sent if host == "h2" else 0} for host in ("h2", "h3", "h4")
    ]
    out = network.command("h1", "doctor", "--network", "--seconds", "0.05").out
    assert "tags  arrive at h2\n" in out
    assert "tags  are taken off on the way to h3, h4, or by the NIC there" in out
    assert "`nicps join --tags` can be used" in out


#: A TC program: r2 = skb->vlan_present; r0 = TC_ACT_OK; if r2 == 0 goto exit; r0 = TC_ACT_SHOT; exit
_DROP_TAGGED = struct.pack(
    "=" + 5 * "BBhi",
    *(0x61, 0x12, 20, 0),
    *(0xB7, 0, 0, 0),
    *(0x15, 2, 1, 0),
    *(0xB7, 0, 0, 2),
    *(0x95, 0, 0, 0),
)


def test_a_port_that_drops_tags(network: Network) -> None:
    """Frames of h1 that have one, as some switches do; all others pass."""
    program = bpf.program_load(bpf.PROGRAM_TYPES["sched_cls"], _DROP_TAGGED, 0, "drop_tagged")
    with at_the_switch(network, "ip link set p1 up", "tc qdisc del dev p1 clsact"):
        hook = (links._CLSACT_INGRESS, "drop_tagged", program)
        netns = namespaces.switch_name(network.lab.name)
        links.with_netlink(netns, lambda ipr: links._hook(ipr, links.index_of(ipr, "p1"), [hook]))
        os.close(program)
        report = measured(network)
        assert said(report) == []
        assert {host["tags"]["received"] for host in report["hosts"]} == {0}
        ended = network.command("h1", "doctor", "--network", "--seconds", "0.05")
    assert "tags  frames with one do not arrive at h2, h3, h4" in ended.out
    assert "leave out `nicps join --tags`" in ended.out


def test_a_port_that_throttles(network: Network) -> None:
    """A switch's storm control is a rate over which frames are dropped: here at the port of h3."""
    command = "tc qdisc add dev p3 root tbf rate 50mbit burst 16kb limit 32kb"
    with at_the_switch(network, command, "tc qdisc del dev p3 root"):
        report = measured(network, seconds="0.3")
    (found,) = said(report)
    assert found.startswith("h3 loses ")
    assert " above 30 Mbit/s, and gets " in found
    advice = [f["mend"] for f in report["findings"] if f["found"] == found]
    assert "join --multicast" in advice[0]
    assert 30e6 < max(train["rate_bps"] for train in report["hosts"][1]["trains"]) < 70e6


def test_a_port_with_a_small_mtu(network: Network) -> None:
    with at_the_switch(network, "ip link set p2 mtu 600", "ip link set p2 mtu 1500"):
        assert said(measured(network)) == ["h2 gets no frame of 1502 bytes, but small ones"]


def test_loss_at_any_rate(network: Network) -> None:
    network.lab.fault("h4", loss=0.2)
    try:
        found = said(measured(network))
    finally:
        network.lab.clear("h4")
    assert any(text.startswith("h4 loses ") and "Mbit/s already" in text for text in found), found
    assert all(text.startswith("h4 ") for text in found), found


def test_who_stands_in_the_way(network: Network, open_path: Path) -> None:
    """One line, and the job goes on; so does the next measurement."""
    ended = network.command("h1", "doctor", "--network", "--seconds", "60")
    assert '"seconds" is 60.0, not a number from 0.05 to 3' in ended.only_error(2)

    def probed() -> int:
        return int(network.agents["h2"].status()["counters"]["probed"])

    before = probed()
    first = network.start("h1", "doctor", "--network", "--json", "--seconds", "0.8")
    until(lambda: probed() > before, "it has begun")
    ended = network.command("h1", "doctor", "--network")
    assert "a measurement is under way here already" in ended.only_error(4)
    ended = network.command("h2", "doctor", "--network")
    assert "h1 measures at the same moment, or has a job under way" in ended.only_error(4)
    assert said(json.loads(network.finish(first).out)) == [], "the first one goes on"
    settings = {"rounds": 100_000, "microbatch_seconds": 0.02}
    channel = network.submit("h1", tiny_job(open_path), light=True, **settings)
    try:
        network.in_training()
        for host in ("h1", "h3"):
            ended = network.command(host, "doctor", "--network")
            assert "a job is under way: measure after its end" in ended.only_error(4)
        network.in_training("h2")
    finally:
        channel.close()
        for host in network.names:
            network.leave(host)


def test_with_a_key_and_alone(tmp_path: Path) -> None:
    """A host without the key hears nothing, and if no host answers there is one line."""
    with Network(3) as network:
        key = tmp_path / "key"
        network.lab.up()
        assert network.finish(network.run("h1", [*NICPS, "key", "new", str(key)])).code == 0
        for host in network.names:
            network.join(host, *(["--key", str(key)] if host != "h3" else []))
        for host in network.names:
            network.answered(host)
        report = measured(network)
        assert [host["name"] for host in report["hosts"]] == ["h2"]
        assert said(report) == []
        network.leave("h2")
        ended = network.command("h1", "doctor", "--network")
        assert "no other host answers: run `nicps join`" in ended.only_error(4)
