# SPDX-License-Identifier: Apache-2.0
"""The P4 program in a real `simple_switch`: what passes, to whom, and what is counted."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.auth import ControlKey, NetworkKey
from nicps.bench.bmv2 import CONTROLLER, Bmv2
from nicps.errors import NetworkProblem
from nicps.lab.namespaces import switch_name
from nicps.protocol.phase import Member as Listed
from nicps.protocol.view import Successor
from nicps.switch import Program, Recorder, Switch, program
from nicps.switch.runtime import Member
from tests.netns.labs import ROOT
from tests.netns.members import NICPS
from tests.p4 import bmv2 as processes
from tests.p4.bmv2 import Wires, bench

NETWORK = wire.network_id("nicps")
BROADCAST = b"\xff" * 6
HOSTS = (1, 2, 3)
NOTHING = dict.fromkeys(("view", "position", "owner", "round", "listed", "settled"), 0)


def mac(number: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, number])


def ethernet(
    source: bytes, data: bytes, to: bytes = BROADCAST, kind: int = wire.ETHERTYPE
) -> bytes:
    return to + source + kind.to_bytes(2, "big") + data


def header(sender: int, view: int = 3, **more: Any) -> wire.Header:
    return wire.Header(network=NETWORK, view=view, round=7, sender=sender, sequence=1, **more)


def token(
    sender: int, hop: int, owner: int, view: int = 3, generation: int = 4, flags: int = 0
) -> bytes:
    entries = [wire.Entry(0, 0, 0, 0, 0, 0, 0) for _ in HOSTS]
    body = wire.Token(generation, hop, owner, 0, len(HOSTS), 0, 0, 0, 0, 0, 0)
    return ethernet(mac(sender), wire.pack(header(sender, view, flags=flags), body, entries, []))


def fragment(sender: int, view: int = 3, index: int = 0) -> bytes:
    body = wire.Fragment(index, 8, 360, 32, 0, 5)
    return ethernet(mac(sender), wire.pack(header(sender, view), body, tail=bytes([sender]) * 1440))


def want(sender: int) -> bytes:
    return ethernet(mac(sender), wire.pack(header(sender), wire.Want(1, 2)))


def install(
    view: int,
    live: tuple[int, ...] = HOSTS,
    base: int = 0,
    key: ControlKey | None = None,
    source: int = 1,
    nonce: int = 9,
    seed: int = 0,
) -> bytes:
    """The list of that view, as that member tells it to another, or to who has asked with that nonce."""
    members = tuple(Listed(k, mac(k), f"h{k}") for k in HOSTS)
    successor = Successor(members, frozenset(live), live[0], 0, 0, 0, 0, bytes([seed]) * 16)
    values, entries = successor.items()
    body = wire.View(
        live=sum(1 << k - 1 for k in live),
        nonce=nonce,
        number=view,
        base=base,
        ballot=1,
        addressee=2,
        members=len(entries),
        values=1,
        step=wire.ViewStep.INSTALL,
    )
    data = wire.pack(header(0, 0), body, values, entries)
    return ethernet(mac(source), key.sign(data, mac(source)) if key is not None else data)


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Bmv2, Wires]]:
    with bench(switch_name(f"test-{os.getpid()}-p4"), len(HOSTS)) as both:
        yield both


@pytest.fixture
def switch(made: tuple[Bmv2, Wires]) -> Iterator[Switch]:
    """Set up for three hosts, each at the port of its number; nothing has passed yet."""
    with made[0].connect() as switch:
        switch.setup(NETWORK, HOSTS, CONTROLLER)
        switch.record({k: Member(k, mac(k), k) for k in HOSTS})
        yield switch


@pytest.fixture
def wires(made: tuple[Bmv2, Wires]) -> Wires:
    return made[1]


def counted(switch: Switch) -> dict[str, int]:
    return {reason: count for reason, count in switch.counters().items() if count}


def test_what_is_not_ours_is_switched(switch: Switch, wires: Wires) -> None:
    """Flooded, until the MAC address has been heard; never back, never to the controller."""
    ping = ethernet(mac(1), b"to whom it concerns".ljust(46), to=mac(2), kind=0x0800)
    assert wires.exchange(1, ping) == {2: [ping], 3: [ping]}
    pong = ethernet(mac(2), b"to you".ljust(46), to=mac(1), kind=0x0800)
    assert wires.exchange(2, pong) == {1: [pong]}
    assert wires.exchange(1, ping) == {2: [ping]}
    arp = ethernet(mac(3), b"who has".ljust(46), kind=0x0806)
    assert wires.exchange(3, arp) == {1: [arp], 2: [arp]}
    assert counted(switch) == {"switched": 4}
    for k in HOSTS:
        ping = ethernet(mac(9), b"to whom it concerns".ljust(46), to=mac(k), kind=0x0800)
        assert wires.exchange(k % 3 + 1, ping) == {k: [ping]}


def test_another_network_is_switched(switch: Switch, wires: Wires) -> None:
    other = wire.Header(network=NETWORK ^ 1, view=3, round=7, sender=2, sequence=1)
    frame = ethernet(mac(2), wire.pack(other, wire.Want(1, 2)))
    heard = wires.exchange(2, frame)
    assert set(heard) == {1, 3} and counted(switch) == {"switched": 1}


def test_control_frames_pass_from_everybody(switch: Switch, wires: Wires) -> None:
    """A host must be able to come in, and to come back."""
    call = ethernet(mac(9), wire.pack(header(0, 0), wire.Call(5, 0, 0)))
    assert {p: [f[: len(call)] for f in fs] for p, fs in wires.exchange(3, call).items()} == {
        1: [call],
        2: [call],
    }
    assert set(wires.exchange(2, want(2))) == {1, 3}
    assert counted(switch) == {"control": 2}


def test_only_the_holder_may_broadcast(switch: Switch, wires: Wires) -> None:
    """R10: the switch follows the token and drops what others send, also what its last owner sends late."""
    assert wires.exchange(1, fragment(1)) == {}  # no token has passed yet
    first = token(1, 1, owner=1)
    assert wires.exchange(1, first) == {2: [first], 3: [first]}
    assert wires.exchange(1, fragment(1)) == {2: [fragment(1)], 3: [fragment(1)]}
    assert wires.exchange(2, fragment(2)) == {}
    handed = token(1, 2, owner=2)
    assert wires.exchange(1, handed) == {2: [handed], 3: [handed]}
    assert wires.exchange(1, fragment(1)) == {}
    assert set(wires.exchange(2, fragment(2))) == {1, 3}
    assert switch.registers() == NOTHING | {
        "view": 3,
        "position": 4 << 32 | 2,
        "owner": 2,
        "round": 7,
    }
    assert counted(switch) == {"view": 1, "token": 2, "fragment": 2, "holder": 2}


def test_order_within_a_burst_is_kept(switch: Switch, wires: Wires) -> None:
    """All that was sent before the token is handed on passes, and nothing after it."""
    burst = [token(1, 1, owner=1), *(fragment(1, index=i) for i in range(8))]
    burst += [token(1, 2, owner=2), fragment(1, index=8)]
    heard = wires.exchange(1, *burst, wait_s=0.4)
    assert heard == {2: burst[:-1], 3: burst[:-1]}
    assert counted(switch) == {"token": 2, "fragment": 8, "holder": 1}


def test_strangers(switch: Switch, wires: Wires) -> None:
    """R4: a member is its number, its MAC address and its port together."""
    wires.exchange(1, token(1, 1, owner=2))
    other_mac = ethernet(mac(9), fragment(2)[14:])
    other_number = ethernet(mac(2), fragment(3)[14:])
    for port, frame in ((2, other_mac), (2, other_number), (3, fragment(2)), (3, token(1, 9, 3))):
        assert wires.exchange(port, frame) == {}
    assert counted(switch) == {"token": 1, "stranger": 4}
    assert switch.registers()["owner"] == 2


def test_nothing_is_learnt_from_what_is_refused(switch: Switch, wires: Wires) -> None:
    """A stranger's fragment in a member's name does not draw the member's frames to the stranger's port."""
    heard = ethernet(mac(1), b"here I am".ljust(46), kind=0x0800)
    ping = ethernet(mac(3), b"to you".ljust(46), to=mac(1), kind=0x0800)
    wires.exchange(1, heard)
    assert wires.exchange(2, fragment(1)) == {} == wires.exchange(2, token(1, 1, owner=1))
    assert wires.exchange(3, ping) == {1: [ping]}
    assert counted(switch) == {"switched": 2, "stranger": 2}


def test_who_has_left_is_a_stranger(switch: Switch, wires: Wires) -> None:
    """R19"""
    wires.exchange(1, token(1, 1, owner=2))
    switch.record({k: Member(k, mac(k), k) for k in (1, 3)})
    assert wires.exchange(2, fragment(2)) == {}
    assert sorted(switch.members()) == [1, 3]


def test_what_the_switch_refuses_is_named(switch: Switch) -> None:
    """Its table has room for as many members as a network may have."""
    with pytest.raises(NetworkProblem, match=r"^the switch refuses: TABLE_FULL$"):
        switch.record({k: Member(k, mac(k), 1) for k in range(1, wire.MAX_MEMBERS + 2)})


def test_views_follow_each_other(switch: Switch, wires: Wires) -> None:
    """The first token of a later view counts; nothing of the one before it does any more."""
    wires.exchange(1, token(1, 5, owner=1))
    assert set(wires.exchange(2, token(2, 1, owner=2, view=4, generation=1))) == {1, 3}
    assert wires.exchange(1, fragment(1)) == {}
    assert wires.exchange(1, token(1, 6, owner=1)) == {}
    assert wires.exchange(2, fragment(2)) == {}
    assert set(wires.exchange(2, fragment(2, view=4))) == {1, 3}
    assert counted(switch) == {"token": 2, "view": 3, "fragment": 1}


def test_old_tokens(switch: Switch, wires: Wires) -> None:
    """A repeat passes, as whoever sent the newest must hear it (R16); it changes nothing."""
    wires.exchange(1, token(1, 5, owner=2))
    assert wires.exchange(3, token(3, 4, owner=3)) == {}
    again = token(3, 4, owner=3, flags=int(wire.Flag.REPEAT))
    assert set(wires.exchange(3, again)) == {1, 2}
    assert switch.registers()["owner"] == 2
    assert counted(switch) == {"token": 2, "stale": 1}


def test_frames_that_cannot_be(switch: Switch, wires: Wires) -> None:
    whole = token(1, 1, owner=2)
    cut = whole[: 14 + 20]
    version = bytearray(whole)
    version[14] = 2
    kind = bytearray(whole)
    kind[15] = 99
    longer = bytearray(whole)
    longer[14 + 18 : 14 + 20] = (1400).to_bytes(2, "big")
    owner = bytearray(whole)
    owner[14 + 32 + 8 : 14 + 32 + 10] = (4).to_bytes(2, "big")
    short = bytearray(whole[: 14 + 40])
    short[14 + 18 : 14 + 20] = (40).to_bytes(2, "big")
    for frame in (cut, version, kind, longer, owner, short):
        assert wires.exchange(1, bytes(frame)) == {}
    counts = counted(switch)
    assert counts.pop("version") == 1 and counts.pop("type") == 1
    assert sum(counts.values()) == 4 and set(counts) == {"truncated", "malformed"}
    assert switch.registers() == NOTHING


# ---- the commands


class Runs:
    """A switch's run-time API, of which only this is asked."""

    def __init__(self, config: str) -> None:
        self._config = config

    def bm_get_config(self) -> str:
        return self._config

    def bm_dev_mgr_show_ports(self) -> list[Any]:
        return []


def test_an_older_program_is_not_ours(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has our counter, and may lack anything else."""
    ours = program.compiled().read_text()
    older = ours.replace("NicpsIngress.token.token_settled", "NicpsIngress.token.token_done")
    for config, runs in (
        (ours, Program.OURS),
        (older, Program.OTHER_NICPS),
        ("{}", Program.ANOTHER),
    ):
        monkeypatch.setattr(switch, "_standard", Runs(config))
        assert switch.info().runs is runs


def command(bmv2: Bmv2, *words: str) -> str:
    """What `nicps switch p4 ...` prints beside the switch."""
    argv = ["ip", "netns", "exec", bmv2.netns, *NICPS, "switch", "p4", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def as_json(bmv2: Bmv2, *words: str) -> Any:
    return json.loads(command(bmv2, *words, "--json"))


def test_every_command(made: tuple[Bmv2, Wires], tmp_path: Path) -> None:
    """As a user gives them: a switch without a controller first, which then gets one."""
    bmv2, wires = made
    assert as_json(bmv2, "connect") == {"program": "nicps"} | {
        f"port {number}": f"{iface} up" for number, iface in bmv2.ports.items()
    }
    assert command(bmv2, "connect").splitlines()[:2] == ["program  nicps", "port 1   near1 up"]
    ports = ("--ports", "1,2,3", "--controller", str(CONTROLLER))
    done = {"program": "there already", "network": "nicps", "ports": [*HOSTS], "controller": 64}
    assert as_json(bmv2, "load", *ports) == done
    assert "ports       [1, 2, 3]" in command(bmv2, "load", *ports)

    by_hand = [f"{k}={wire.mac_text(mac(k))}@{k}" for k in HOSTS]
    listed = {str(k): f"{wire.mac_text(mac(k))} at port {k}" for k in HOSTS}
    assert command(bmv2, "members") == ""
    assert as_json(bmv2, "members", *by_hand) == listed == as_json(bmv2, "members")
    assert command(bmv2, "members").splitlines()[1] == "2  02:00:00:00:00:02 at port 2"
    assert set(wires.exchange(1, token(1, 2, owner=2, view=40))) == {2, 3}
    registers = {"view": 40, "generation": 4, "hop": 2, "owner": 2, "round": 7}
    assert as_json(bmv2, "registers") == registers | {"listed": [], "settled": 0}
    assert "owner       2" in command(bmv2, "registers")
    assert as_json(bmv2, "counters")["token"] == 1
    assert "token      1" in command(bmv2, "counters").splitlines()

    assert wires.exchange(1, token(1, 1, owner=1, view=1)) == {}
    command(bmv2, "members", *by_hand)  # the second network, whose views begin with 1 again
    assert set(wires.exchange(1, token(1, 1, owner=1, view=1))) == {2, 3}

    assert command(bmv2, "reset") == ""
    assert as_json(bmv2, "members") == {} and as_json(bmv2, "registers")["view"] == 0
    assert not any(as_json(bmv2, "counters").values())
    command(bmv2, "members", *by_hand)
    with processes.controller(bmv2, tmp_path / "log") as running:
        assert "whom the switch serves already" in running.log.read_text()
        assert as_json(bmv2, "members") == listed
    command(bmv2, "load", "--ports", "1,2")
    with processes.controller(bmv2, tmp_path / "log") as running:
        assert running.log.read_text().endswith("recording the members of nicps\n")
        assert as_json(bmv2, "members") == {}


# ---- the controller: what it records, and when

CONTROLLERS = bytes.fromhex("020000000064")
KEY = NetworkKey(b"k" * 32)


class Controller:
    """A `Recorder` at the controller's port, and hosts that answer its questions."""

    def __init__(self, switch: Switch, wires: Wires, key: NetworkKey | None = KEY) -> None:
        self._wires, self._key = wires, key
        self.recorder = Recorder(switch, NETWORK, CONTROLLERS, key)
        self.now = 100.0

    def hears(self, port: int, frame: bytes) -> None:
        """A host sends; the controller gets what the switch sends it of that."""
        for told in self._wires.exchange(port, frame, wait_s=0.05).get(CONTROLLER, []):
            self.recorder.on_frame(self.now, told)

    def asks(self) -> int | None:
        """Time passes; the nonce of its question, if it has one: every host gets that."""
        self.now += 0.5
        question = self.recorder.question(self.now)
        if question is None:
            return None
        assert self._key is None or self._key.verify(question, CONTROLLERS)
        heard = self._wires.exchange(CONTROLLER, ethernet(CONTROLLERS, question))
        assert sorted(heard) == [*HOSTS]
        body = wire.unpack(question).body
        assert isinstance(body, wire.View) and body.step == wire.ViewStep.ASK
        return body.nonce

    def answered(
        self,
        view: int,
        by: dict[int, int],
        live: tuple[int, ...] = HOSTS,
        base: int = 0,
        seed: int = 0,
    ) -> None:
        """It asks, and these members, each at its port, say that this view is in force."""
        nonce = self.asks()
        assert nonce is not None
        for source, port in by.items():
            self.hears(port, install(view, live, base, self._key, source, nonce, seed))


@pytest.fixture
def asking(switch: Switch, wires: Wires) -> Controller:
    """Nobody is recorded yet."""
    switch.reset()
    return Controller(switch, wires)


def recorded(switch: Switch) -> dict[int, int]:
    """Ports by number."""
    members = switch.members()
    assert all(m.mac == mac(k) for k, m in members.items())
    return {k: m.port for k, m in members.items()}


def test_members_are_recorded_where_they_answer(asking: Controller, switch: Switch) -> None:
    """The list first, then the question, then who says that it is in force there; more than half must."""
    assert asking.asks() is None
    asking.hears(1, install(1, key=KEY))
    assert recorded(switch) == {}
    asking.answered(1, {1: 1})
    assert recorded(switch) == {}
    asking.answered(1, {2: 2, 1: 1})
    assert recorded(switch) == {1: 1, 2: 2} and asking.recorder.missing == ["h3"]
    news = asking.recorder.news(asking.now + 1.0)
    assert news is not None and news.startswith("view 1: h1 at port 1, h2 at port 2, no answer")
    assert asking.recorder.news(asking.now + 2.0) is None
    asking.answered(1, {3: 3})
    assert recorded(switch) == {1: 1, 2: 2, 3: 3}
    assert asking.recorder.news(asking.now) == "view 1: h1 at port 1, h2 at port 2, h3 at port 3"
    assert asking.asks() is None
    asking.hears(1, install(1, key=KEY))  # to the next addressee
    assert asking.asks() is None


def test_who_is_struck_off_is_recorded_no_more(asking: Controller, switch: Switch) -> None:
    """R19; and it comes back with a later view, at another port if it was plugged in there."""
    asking.hears(1, install(1, key=KEY))
    asking.answered(1, {k: k for k in HOSTS})
    asking.hears(1, install(2, (1, 2), base=1, key=KEY))
    asking.answered(2, {1: 1, 2: 2}, (1, 2), base=1)
    assert recorded(switch) == {1: 1, 2: 2}
    asking.hears(2, install(3, (2, 3), base=2, key=KEY, source=2))
    asking.answered(3, {3: 1, 2: 2}, (2, 3), base=2)
    assert recorded(switch) == {2: 2, 3: 1} and asking.recorder.view == 3


def test_yesterdays_lists_change_nothing(asking: Controller, switch: Switch, wires: Wires) -> None:
    """A stranger that has kept frames of the same key: first lists, long ones, and answers to earlier questions."""
    asking.hears(1, install(5, key=KEY))
    old = asking.asks()
    assert old is not None
    kept = [install(5, HOSTS, 4, KEY, k, old) for k in HOSTS]
    for k in HOSTS:
        asking.hears(k, kept[k - 1])
    asking.hears(1, install(6, (1, 2), 5, KEY))
    asking.answered(6, {1: 1, 2: 2}, (1, 2), base=5)
    wires.exchange(1, token(1, 5, owner=1, view=6))
    before = switch.registers()
    for replayed in (*kept, install(1, key=KEY), install(1 << 30, HOSTS, 1 << 29, KEY)):
        asking.hears(3, replayed)
        assert asking.asks() is not None
        for answer in kept:
            asking.hears(3, answer)
    assert recorded(switch) == {1: 1, 2: 2} and switch.registers() == before
    asking.hears(1, install(7, HOSTS, 6, KEY))
    asking.answered(7, {1: 1, 2: 2, 3: 3}, base=6)
    assert recorded(switch) == {1: 1, 2: 2, 3: 3} and asking.recorder.view == 7


def test_a_stranger_with_a_members_address_moves_nobody(
    asking: Controller, switch: Switch, wires: Wires
) -> None:
    """What it sends in the member's name is refused or proves nothing, and what it sends on comes too late."""
    asking.hears(1, install(1, key=KEY))
    for frame in (want(1), fragment(1), ethernet(mac(1), b"hello".ljust(46), kind=0x0800)):
        wires.exchange(3, frame)
    nonce = asking.asks()
    assert nonce is not None
    answer = install(1, HOSTS, 0, KEY, 1, nonce)
    asking.hears(3, install(1, HOSTS, 0, NetworkKey(b"x" * 32), 1, nonce))
    asking.hears(1, answer)
    asking.hears(3, answer)
    asking.hears(2, install(1, HOSTS, 0, KEY, 2, nonce))
    assert recorded(switch) == {1: 1, 2: 2} and asking.recorder.refused == 1
    ours = bytearray(install(1, HOSTS, 0, KEY, 3, nonce))
    ours[:6] = CONTROLLERS  # it knows the controller's own address
    asking.hears(2, bytes(ours))
    assert recorded(switch) == {1: 1, 2: 2}


def test_a_new_network_begins_with_its_own_numbers(
    asking: Controller, switch: Switch, wires: Wires
) -> None:
    """Of agents that have all been started anew: no older token stands in their way."""
    for seed, view in enumerate((40, 1, 1)):
        asking.hears(1, install(view, key=KEY, seed=seed))
        asking.answered(view, {k: k for k in HOSTS}, seed=seed)
        assert asking.recorder.view == view and recorded(switch) == {k: k for k in HOSTS}
        assert set(wires.exchange(1, token(1, 9 - seed, owner=1, view=view))) == {2, 3}


@pytest.mark.parametrize("number", [40, 0xFFFFFFFF])
def test_old_tokens_are_forgotten(
    asking: Controller, switch: Switch, wires: Wires, number: int
) -> None:
    """Of another network, or a stranger's at a member's own port."""
    asking.hears(1, install(1, key=KEY))
    asking.answered(1, {k: k for k in HOSTS})
    wires.exchange(1, token(1, 5, owner=1, view=number))
    asking.hears(1, install(2, HOSTS, 1, KEY))
    asking.answered(2, {k: k for k in HOSTS}, base=1)
    assert switch.registers() == NOTHING
    assert set(wires.exchange(1, token(1, 1, owner=1, view=2))) == {2, 3}


def test_a_controller_that_is_started_again(
    asking: Controller, switch: Switch, wires: Wires
) -> None:
    """It finds members and token as they are, asks by itself, and leaves all as it is."""
    asking.hears(1, install(1, key=KEY))
    asking.answered(1, {k: k for k in HOSTS})
    wires.exchange(1, token(1, 5, owner=1, view=1))
    before = switch.registers()
    again = Controller(switch, wires)
    again.recorder.ask(again.now)
    again.answered(1, {1: 1, 2: 2})
    assert recorded(switch) == {k: k for k in HOSTS} and switch.registers() == before
    assert again.recorder.missing == ["h3"]
    again.answered(1, {3: 3})
    assert recorded(switch) == {k: k for k in HOSTS} and not again.recorder.missing


def test_without_a_key_members_answer_too(switch: Switch, wires: Wires) -> None:
    switch.reset()
    asking = Controller(switch, wires, None)
    asking.hears(1, install(1))
    asking.answered(1, {1: 1, 2: 2, 3: 3})
    assert recorded(switch) == {1: 1, 2: 2, 3: 3}
