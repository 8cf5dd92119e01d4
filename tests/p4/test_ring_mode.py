# SPDX-License-Identifier: Apache-2.0
"""The P4 program in a real `simple_switch`: what passes, to whom, and what is counted."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.errors import NetworkProblem
from nicps.switch import Switch
from nicps.switch.runtime import Member
from tests.p4.bmv2 import Wires
from tests.p4.frames import (
    CALLS,
    HOSTS,
    NETWORK,
    NOTHING,
    SERVERS,
    STRIPES,
    between_members,
    ethernet,
    fragment,
    header,
    mac,
    token,
    want,
)


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


BETWEEN_MEMBERS = [(kind, "stripe") for kind in STRIPES]
BETWEEN_MEMBERS += [(kind, "server") for kind in (*SERVERS, *CALLS)]


@pytest.mark.parametrize(("kind", "reason"), BETWEEN_MEMBERS)
def test_frames_between_members_pass_of_any_member(
    switch: Switch, wires: Wires, kind: wire.FrameType, reason: str
) -> None:
    """To the port of the member that they are for, or to all; whoever has the token."""
    assert wires.exchange(2, between_members(2, kind=kind)) == {}  # no token has passed yet
    wires.exchange(1, token(1, 1, owner=1))
    to_all, to_one = between_members(2, kind=kind), between_members(3, to=1, kind=kind)
    assert wires.exchange(2, to_all) == {1: [to_all], 3: [to_all]}
    assert wires.exchange(3, to_one) == {1: [to_one]}
    assert counted(switch) == {"view": 1, "token": 1, reason: 2}


@pytest.mark.parametrize("kind", [*STRIPES, *SERVERS, *CALLS])
def test_frames_between_members_of_strangers_and_of_other_views_do_not_pass(
    switch: Switch, wires: Wires, kind: wire.FrameType
) -> None:
    """R4: by number, MAC address and port."""
    wires.exchange(1, token(1, 1, owner=1))
    other_mac = ethernet(mac(9), between_members(2, kind=kind)[14:])
    other_number = ethernet(mac(2), between_members(3, kind=kind)[14:])
    for port, frame in (
        (2, other_mac),
        (2, other_number),
        (3, between_members(2, to=1, kind=kind)),
    ):
        assert wires.exchange(port, frame) == {}
    for view in (2, 4):
        assert wires.exchange(2, between_members(2, to=1, view=view, kind=kind)) == {}
    assert counted(switch) == {"token": 1, "stranger": 3, "view": 2}


def test_what_a_linux_switch_and_members_tell_each_other_passes(
    switch: Switch, wires: Wires
) -> None:
    """Who believes whom is their own matter."""
    body = wire.Switch(1, 2, 3, 4, 5, 8, wire.SwitchStep.HELLO)
    data = wire.pack(header(0, 0), body)
    for port, source in ((3, wire.SWITCH), (1, mac(1))):
        frame = ethernet(source, data)
        others = {p: [frame] for p in HOSTS if p != port}
        heard = wires.exchange(port, frame)
        assert {p: [f[: len(frame)] for f in fs] for p, fs in heard.items()} == others
    assert counted(switch) == {"control": 2}


@pytest.mark.parametrize("kind", [wire.FrameType.SUM, wire.FrameType.LACKING])
def test_a_linux_switch_sends_from_its_port(
    switch: Switch, wires: Wires, kind: wire.FrameType
) -> None:
    """Its sums and answers pass where number 0 is recorded; tokens and fragments of number 0 never do."""
    first = token(1, 1, owner=1)
    wires.exchange(1, first)
    frame = ethernet(wire.SWITCH, between_members(0, kind=kind)[14:])
    assert wires.exchange(3, frame) == {}
    members = {k: Member(k, mac(k), k) for k in (1, 2)}
    switch.record({0: Member(0, wire.SWITCH, 3), **members})
    assert wires.exchange(3, frame) == {1: [frame], 2: [frame]}
    assert wires.exchange(2, frame) == {}
    held = between_members(0, kind=wire.FrameType.HELD)
    adds = fragment(0, flags=wire.Flag.ADD)
    for data in (token(0, 2, owner=1), fragment(0), adds, held):
        assert wires.exchange(3, ethernet(wire.SWITCH, data[14:])) == {}
    contribution = between_members(2)[14:]
    to_switch = ethernet(mac(2), contribution, to=wire.SWITCH)
    assert wires.exchange(2, to_switch) == {3: [to_switch]}
    assert counted(switch) == {"token": 1, "stranger": 6, "stripe": 2}


def test_a_fragment_that_the_switch_adds_is_anybodys(switch: Switch, wires: Wires) -> None:
    """Of members in the list; one for hosts is the holder's."""
    wires.exchange(1, token(1, 1, owner=1, listed=0b011))
    adds = [fragment(k, flags=wire.Flag.ADD) for k in HOSTS]
    assert wires.exchange(2, adds[1]) == {} == wires.exchange(2, fragment(2))
    assert wires.exchange(3, adds[2]) == {}
    assert set(wires.exchange(1, adds[0])) == {1, 2, 3}
    assert set(wires.exchange(3, adds[2])) == {3}
    expected = {"token": 1, "added": 1, "holder": 1, "unlisted": 1, "summed": 1, "answered": 1}
    assert counted(switch) == expected


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
    """Its table has room for as many members as a network may have, and a Linux switch."""
    with pytest.raises(NetworkProblem, match=r"^the switch refuses: TABLE_FULL$"):
        switch.record({k: Member(k, mac(k), 1) for k in range(wire.MAX_MEMBERS + 2)})


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
