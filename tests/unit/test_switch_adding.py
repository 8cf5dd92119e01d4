# SPDX-License-Identifier: Apache-2.0
"""What a Linux switch that adds believes, when it adds for whom, and what it says of itself (docs/linux-switch.md)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from nicps import wire
from nicps.switch.adding import Adding, NoRoom
from nicps.switch.grants import Granted
from nicps.switchauth import SwitchKey
from nicps.wire import SwitchStep

NETWORK = wire.network_id("test")
KEY = SwitchKey.of(b"k" * 32)
OTHER_KEY = SwitchKey.of(b"x" * 32)
BOOT = 10**18


def mac(number: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, number))


@dataclass
class Memory:
    """Places that only note what is done with them."""

    most: int = 10**9
    done: list[tuple[object, ...]] = field(default_factory=list)

    def grow(self, fragments: int, width: int) -> None:
        if fragments > self.most:
            raise NoRoom(f"{fragments} fragments need more than --memory")
        self.done.append(("grow", fragments, width))

    def enter_view(self, granted: Granted) -> None:
        self.done.append(("enter", granted.number, granted.seed, granted.live, granted.siphash))

    def leave_view(self) -> None:
        self.done.append(("leave",))


class Scene:
    """A switch, its memory, and hosts that grant."""

    def __init__(self, key: SwitchKey | None = None, most: int = 10**9) -> None:
        numbers = itertools.count(1000)
        self.memory = Memory(most)
        self.adding = Adding(self.memory, NETWORK, BOOT, key, lambda: next(numbers))
        self.key = key
        self.now = 100.0

    def said(self, step: SwitchStep | None = None) -> list[wire.Switch]:
        """What it sends now."""
        bodies = []
        for frame in self.adding.frames(self.now):
            assert self.key is None or self.key.control.verify(frame, wire.SWITCH)
            unpacked = wire.unpack(frame)
            assert unpacked.header.network == NETWORK and unpacked.header.sender == 0
            assert isinstance(unpacked.body, wire.Switch)
            bodies.append(unpacked.body)
        return [body for body in bodies if step in (None, body.step)]

    def hello(self, after_s: float = 1.0) -> int:
        """The nonce of its next HELLO."""
        self.now += after_s
        (body,) = self.said(SwitchStep.HELLO)
        assert body.boot == self.adding.boot
        return body.nonce

    def grant(
        self,
        nonce: int,
        view: int,
        *by: int,
        live: tuple[int, ...] = (1, 2, 3),
        seed: int = 7,
        room: tuple[int, int] = (0, 0),
        source: bytes | None = None,
        key: SwitchKey | None = None,
        boot: int | None = None,
        siphash: bytes = bytes(16),
        lead: int = 1,
        nowhere: int = 0,
    ) -> None:
        """These members grant; the member `nowhere` has no address."""
        for number in by:
            fragments, width = room
            at = self.adding.boot if boot is None else boot
            body = wire.Switch(at, nonce, 0, view, fragments, width, SwitchStep.GRANT)
            head = wire.Header(network=NETWORK, view=view, sender=number, sequence=1)
            told = wire.Grant(
                bytes([seed] * 16), siphash, f"h{number}".encode().ljust(14, b"\0"), lead
            )
            macs = {k: bytes(6) if k == nowhere else mac(k) for k in live}
            tail = wire.pack_grant(told, [wire.GrantMember(macs[k], k) for k in live])
            frame, whose = wire.pack(head, body, tail=tail), source or mac(number)
            used = key or self.key
            self.adding.on_frame(self.now, whose, used.seal(frame, whose) if used else frame)

    def entered(self) -> list[int]:
        return [int(str(what[1])) for what in self.memory.done if what[0] == "enter"]


def install(view: int, network: int = NETWORK) -> bytes:
    body = wire.View(0, 0, view, 0, 0, 0, 0, 0, wire.ViewStep.INSTALL)
    return wire.pack(wire.Header(network=network), body)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_majority_puts_a_list_in_force(key: SwitchKey | None) -> None:
    """With a key too: a view is granted to one boot, so of two switches one adds at most."""
    scene = Scene(key)
    nonce = scene.hello()
    scene.grant(nonce, 5, 1, siphash=b"s" * 16 if key else bytes(16))
    assert scene.memory.done == [] and not scene.said(SwitchStep.READY)
    scene.grant(nonce, 5, 3, siphash=b"s" * 16 if key else bytes(16))
    siphash = b"s" * 16 if key else None
    live = {k: mac(k) for k in (1, 2, 3)}
    assert scene.memory.done == [("enter", 5, bytes([7] * 16), live, siphash)]
    (ready,) = scene.said(SwitchStep.READY)
    assert (ready.number, ready.members, ready.boot) == (5, 0b101, BOOT)
    assert ready.nonce == int.from_bytes(bytes([7] * 8), "big")
    scene.grant(nonce, 5, 2, siphash=b"s" * 16 if key else bytes(16))
    (ready,) = scene.said(SwitchStep.READY)
    assert ready.members == 0b111
    assert scene.said() == []


def test_the_same_member_is_no_majority() -> None:
    scene = Scene()
    nonce = scene.hello()
    for _ in range(3):
        scene.grant(nonce, 5, 2)
    scene.grant(nonce, 5, 1, live=(1, 2, 3, 4))
    scene.grant(nonce, 5, 3, seed=8)
    scene.grant(nonce, 5, 3, lead=3)
    assert scene.entered() == []


def test_hello_once_a_second_and_at_once_for_another_view() -> None:
    """But not more often than every 100 ms, whatever passes; each with a fresh nonce."""
    scene = Scene()
    seen = {scene.hello(), scene.hello(), scene.hello()}
    assert len(seen) == 3
    scene.now += 0.03
    assert scene.said() == []
    for view in range(2, 50):
        scene.adding.on_frame(scene.now, mac(1), install(view))
    assert scene.said() == []
    assert scene.adding.wait(scene.now, 5.0) == pytest.approx(0.07)
    seen.add(scene.hello(0.07))
    scene.adding.on_frame(scene.now, mac(1), install(9, wire.network_id("another")))
    scene.now += 0.5
    assert scene.said() == [] and len(seen) == 4
    scene.adding.hear_of(scene.now, 3)
    assert len(scene.said(SwitchStep.HELLO)) == 1


def test_what_passes_of_the_view_in_force_asks_nothing() -> None:
    scene = Scene()
    scene.grant(scene.hello(), 5, 1, 2, 3)
    scene.said()
    scene.now += 0.5
    scene.adding.on_frame(scene.now, mac(1), install(5))
    scene.adding.hear_of(scene.now, 5)
    assert scene.said() == []


def test_a_nonce_counts_for_three_seconds() -> None:
    scene = Scene()
    old = scene.hello()
    last = [scene.hello() for _ in range(4)][-1]
    scene.grant(old, 5, 1, 2, 3)
    scene.grant(12345, 5, 1, 2, 3)
    assert scene.entered() == [] and scene.adding.refused["late"] == 6
    scene.grant(last, 5, 1, 2, 3)
    assert scene.entered() == [5]


def test_nonces_of_a_switch_that_nobody_answers_are_forgotten() -> None:
    scene = Scene()
    for _ in range(100):
        scene.hello()
    assert len(scene.adding._nonces) <= 4


def test_a_grant_for_another_boot_is_void() -> None:
    scene = Scene()
    scene.grant(scene.hello(), 5, 1, 2, 3, boot=BOOT - 1)
    assert scene.entered() == []


def test_a_later_view_follows_and_an_earlier_one_does_not() -> None:
    scene = Scene()
    nonce = scene.hello()
    scene.grant(nonce, 5, 1, 2, 3)
    scene.grant(nonce, 6, 1, 2, live=(1, 2))
    assert scene.entered() == [5, 6]
    scene.grant(nonce, 5, 1, 2, 3)  # what was under way
    scene.grant(scene.hello(), 5, 1, 2, 3)
    assert scene.entered() == [5, 6] and scene.adding.boot == BOOT
    assert [body.number for body in scene.said(SwitchStep.READY)] == []


@pytest.mark.parametrize(("view", "seed"), [(1, 9), (40, 9)])
def test_hosts_that_begin_anew(view: int, seed: int) -> None:
    """Lower numbers, or the same with another seed: places of another network have the same tags, so a boot begins."""
    scene = Scene()
    scene.grant(scene.hello(), 40, 1, 2, 3, room=(100, 8))
    scene.grant(scene.hello(), view, 1, 2, seed=seed)
    scene.grant(scene.hello(), view, 1, 2, seed=seed)
    assert scene.adding.boot == BOOT, "the list in force was granted 2 seconds ago"
    scene.grant(scene.hello(), view, 1, 2, seed=seed)
    assert scene.adding.boot == BOOT + 1 and scene.adding.granted is None
    assert scene.memory.done[-2:] == [("grow", 100, 8), ("leave",)], "the places are empty"
    scene.grant(scene.hello(), view + 1, 1, 2, 3, seed=seed + 1)
    assert scene.entered() == [40, view + 1]


def test_hosts_that_another_network_took_the_switch_from_get_it_back() -> None:
    """Their view is the one that they had granted before: they must have a new boot, and so ask for a new view."""
    scene = Scene()
    scene.grant(scene.hello(), 4, 1, 2, 3)
    scene.grant(scene.hello(), 40, 4, 5, live=(4, 5), lead=4, seed=9)
    assert scene.entered() == [4, 40]
    for _ in range(3):
        assert scene.adding.boot == BOOT
        scene.grant(scene.hello(), 4, 1, 2, 3)
    assert scene.adding.boot == BOOT + 1
    scene.grant(scene.hello(0.1), 5, 1, 2, 3, seed=8)
    assert scene.entered() == [4, 40, 5]


def test_one_answer_of_an_old_list_does_not_begin_anew() -> None:
    scene = Scene()
    scene.grant(scene.hello(), 40, 1, 2, 3)
    scene.hello(4.0)
    scene.grant(scene.hello(), 4, 1, 2)
    scene.hello()
    scene.grant(scene.hello(), 4, 1, 2)
    assert scene.adding.boot == BOOT


def test_room_is_what_the_lead_grants() -> None:
    scene = Scene()
    nonce = scene.hello()
    scene.grant(nonce, 5, 1, 2, 3)
    assert scene.memory.done[0][0] == "enter"
    scene.grant(nonce, 5, 2, room=(500, 8))
    assert scene.adding.room == (0, 0)
    scene.said()
    scene.grant(nonce, 5, 1, room=(1000, 16))
    assert scene.memory.done[1:] == [("grow", 1000, 16)] and scene.adding.boot == BOOT
    (ready,) = scene.said(SwitchStep.READY)
    assert (ready.fragments, ready.width) == (1000, 16)
    scene.grant(nonce, 5, 1, room=(900, 16))
    assert len(scene.memory.done) == 2


@pytest.mark.parametrize("room", [(2000, 16), (1000, 8)])
def test_larger_maps_are_another_boot(room: tuple[int, int]) -> None:
    """What the maps held is lost, so no view that was granted before may go on with them."""
    scene = Scene()
    nonce = scene.hello()
    scene.grant(nonce, 5, 1, 2, 3, room=(1000, 16))
    scene.grant(nonce, 5, 1, room=room)
    assert scene.memory.done[-2:] == [("grow", *room), ("leave",)]
    assert scene.adding.boot == BOOT + 1 and scene.adding.granted is None
    nonce = scene.hello(0.1)
    scene.grant(nonce, 5, 1, 2, 3, room=room, boot=BOOT)
    assert scene.adding.granted is None
    scene.grant(nonce, 6, 1, 2, 3, room=room)
    assert scene.entered() == [5, 6]


def test_no_list_is_in_force_in_two_boots() -> None:
    """Whoever grants it again: sums of the boot before may be at some members."""
    scene = Scene()
    scene.grant(scene.hello(), 5, 1, 2, 3, room=(1000, 16))
    scene.grant(scene.hello(), 5, 1, room=(2000, 16))
    scene.grant(scene.hello(0.1), 5, 1, 2, 3, room=(2000, 16))
    assert scene.entered() == [5] and scene.adding.refused["past"] == 3
    assert scene.adding.granted is None


def test_a_room_that_is_there_before_the_list() -> None:
    """A list comes into force with maps that are large enough, or not at all."""
    scene = Scene()
    scene.grant(scene.hello(), 5, 1, 2, 3, room=(1000, 16))
    scene.grant(scene.hello(), 6, 1, 2, room=(3000, 16), live=(1, 2))
    assert scene.entered() == [5] and scene.adding.boot == BOOT + 1
    scene.grant(scene.hello(), 7, 1, 2, room=(3000, 16), live=(1, 2))
    assert scene.entered() == [5, 7] and scene.adding.boot == BOOT + 1


def test_too_little_memory_is_said_once_and_ready_tells_the_room() -> None:
    scene = Scene(most=2000)
    nonce = scene.hello()
    scene.grant(nonce, 5, 1, 2, 3, room=(1000, 8))
    scene.adding.lines(scene.now)
    for _ in range(3):
        scene.grant(nonce, 5, 1, room=(5000, 8))
    assert scene.adding.lines(scene.now) == [
        "5000 fragments need more than --memory: the hosts train without this switch"
    ]
    assert scene.adding.boot == BOOT and scene.adding.room == (1000, 8)
    (ready,) = scene.said(SwitchStep.READY)
    assert (ready.fragments, ready.width) == (1000, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": mac(9)},
        {"source": mac(2)},
        {"live": (1,)},
        {"live": (2, 3)},
        {"live": (3, 2, 1)},
        {"lead": 4},
        {"nowhere": 2},
        {"view": 0},
        {"room": (10, 7)},
        {"siphash": b"s" * 16},
    ],
)
def test_grants_that_cannot_be_meant(wrong: dict[str, object]) -> None:
    scene = Scene()
    view = wrong.pop("view", 5)
    assert isinstance(view, int)
    scene.grant(scene.hello(), view, 1, **wrong)  # type: ignore[arg-type]
    assert scene.adding.refused["grant"] == 1 and scene.adding.granted is None


def test_a_host_that_sends_its_key_in_the_clear_is_named() -> None:
    scene = Scene()
    scene.grant(scene.hello(), 5, 1, siphash=b"s" * 16)
    (line,) = scene.adding.lines(scene.now)
    assert line.startswith("02:00:00:00:00:01 (h1) has sent the key of a view in the clear: ")


def test_keys_that_do_not_fit_are_told() -> None:
    """Each in one line, once."""
    for key, theirs, words in (
        (KEY, OTHER_KEY, "another key"),
        (None, KEY, "--key"),
    ):
        scene = Scene(key)
        nonce = scene.hello()
        scene.grant(nonce, 5, 1, key=theirs)
        scene.grant(nonce, 5, 1, key=theirs)
        (line,) = scene.adding.lines(scene.now)
        assert words in line and scene.adding.refused["grant"] == 2
    scene = Scene(KEY)
    scene.key = None
    numbers = scene.adding.frames(scene.now)
    body = wire.unpack(numbers[0]).body
    assert isinstance(body, wire.Switch)
    scene.grant(body.nonce, 5, 1, 2, 3)
    assert "--switch-key" in scene.adding.lines(scene.now)[0] and scene.adding.granted is None


def test_what_it_says_to_the_user() -> None:
    scene = Scene()
    nonce = scene.hello()
    scene.grant(nonce, 5, 1, 2)
    assert scene.adding.lines(scene.now) == []
    scene.now += 0.5
    (line,) = scene.adding.lines(scene.now)
    assert (
        line
        == f"view 5: adding for h1, h2; no grant from {mac(3).hex(':')}, so the hosts do not use it"
    )
    assert scene.adding.lines(scene.now) == []
    scene.grant(nonce, 5, 3)
    assert scene.adding.lines(scene.now) == ["view 5: adding for h1, h2, h3"]


def test_hosts_that_do_not_believe_are_told_how() -> None:
    scene = Scene()
    scene.hello()
    scene.adding.on_frame(scene.now, mac(1), install(3))
    assert scene.adding.lines(scene.now) == []
    scene.now += 5.0
    (line,) = scene.adding.lines(scene.now)
    assert "--trust-switch" in line and "--switch-key" in line


def test_another_switch_is_named() -> None:
    scene, other = Scene(), Scene()
    other.adding.boot += 5
    other.now += 1.0
    for frame in other.adding.frames(other.now):
        scene.adding.on_frame(scene.now, wire.SWITCH, frame)
        scene.adding.on_frame(scene.now, wire.SWITCH, frame)
    (line,) = scene.adding.lines(scene.now)
    assert "another switch" in line


def test_rubbish_is_counted() -> None:
    scene = Scene()
    scene.adding.on_frame(scene.now, mac(1), b"")
    body = wire.Switch(BOOT, 0, 0, 5, 0, 0, SwitchStep.GRANT)
    scene.adding.on_frame(scene.now, mac(1), wire.pack(wire.Header(network=NETWORK), body))
    assert sum(scene.adding.refused.values()) == 2
