# SPDX-License-Identifier: Apache-2.0
"""The controller at a real `simple_switch`: whom it records, when, and at which port."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.auth import NetworkKey
from nicps.bench.bmv2 import CONTROLLER
from nicps.switch import Recorder, Switch
from nicps.switch.runtime import Member
from tests.netns.labs import until
from tests.p4.bmv2 import Wires
from tests.p4.frames import (
    HOSTS,
    NETWORK,
    NOTHING,
    ethernet,
    fragment,
    install,
    mac,
    token,
    want,
)

CONTROLLERS = bytes.fromhex("020000000064")
KEY = NetworkKey(b"k" * 32)


class Controller:
    """A `Recorder` at the controller's port, and hosts that answer its questions."""

    def __init__(
        self,
        switch: Switch,
        wires: Wires,
        key: NetworkKey | None = KEY,
        linux_switch: int | None = None,
    ) -> None:
        self._wires, self._key = wires, key
        self.recorder = Recorder(switch, NETWORK, CONTROLLERS, key, linux_switch)
        self.now = 100.0

    def hears(self, port: int, frame: bytes) -> None:
        """A host sends a list, which the switch sends to the controller too."""
        told: list[bytes] = []

        def heard() -> bool:
            told.extend(self._wires.heard().get(CONTROLLER, []))
            return bool(told)

        self._wires.heard()
        self._wires.send(port, frame)
        until(heard, "the controller's copy", 5.0)
        for copy in told:
            self.recorder.on_frame(self.now, copy)

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
    news = asking.recorder.describe_change(asking.now + 1.0)
    assert news is not None and news.startswith("view 1: h1 at port 1, h2 at port 2, no answer")
    assert asking.recorder.describe_change(asking.now + 2.0) is None
    asking.answered(1, {3: 3})
    assert recorded(switch) == {1: 1, 2: 2, 3: 3}
    assert (
        asking.recorder.describe_change(asking.now)
        == "view 1: h1 at port 1, h2 at port 2, h3 at port 3"
    )
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


def test_a_linux_switch_is_recorded_at_its_port(switch: Switch, wires: Wires) -> None:
    """With every list; a controller that is told of none forgets it."""
    switch.reset()
    asking = Controller(switch, wires, linux_switch=3)
    asking.hears(1, install(1, key=KEY))
    asking.answered(1, {k: k for k in HOSTS})
    members = {k: Member(k, mac(k), k) for k in HOSTS}
    assert switch.members() == {0: Member(0, wire.SWITCH, 3), **members}
    said = asking.recorder.describe_change(asking.now)
    assert said == "view 1: h1 at port 1, h2 at port 2, h3 at port 3"
    asking.hears(1, install(2, (1, 2), base=1, key=KEY))
    asking.answered(2, {1: 1, 2: 2}, (1, 2), base=1)
    assert sorted(switch.members()) == [0, 1, 2]
    again = Controller(switch, wires)
    again.recorder.ask(again.now)
    again.answered(2, {1: 1, 2: 2}, (1, 2), base=1)
    assert sorted(switch.members()) == [1, 2]


def test_without_a_key_members_answer_too(switch: Switch, wires: Wires) -> None:
    switch.reset()
    asking = Controller(switch, wires, None)
    asking.hears(1, install(1))
    asking.answered(1, {1: 1, 2: 2, 3: 3})
    assert recorded(switch) == {1: 1, 2: 2, 3: 3}
