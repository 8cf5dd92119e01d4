# SPDX-License-Identifier: Apache-2.0
"""What a host grants to a Linux switch that adds, and when it says that the switch can add."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.protocol import Send, SwitchChanged, View
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.signals import Renew, Steps
from nicps.protocol.switch_link import FRESH_S, SwitchLink, name_of
from nicps.wire import SwitchStep
from tests.listed import members_of

pytestmark = pytest.mark.unit

MEMBERS = members_of(3)
SEED = bytes(range(16))
VIEW = View(4, MEMBERS, frozenset({1, 2, 3}), 1, seed=SEED)
NEXT = View(5, MEMBERS, frozenset({1, 3}), 1, seed=bytes(16))
BOOT, NONCE = 1000, 77


def link(number: int = 2, view: View = VIEW, *, believes: bool = True) -> SwitchLink:
    member = MEMBERS[number - 1]
    host = LocalHost(member.mac, member.name, NodeState.MEMBER, view, number)
    return SwitchLink(host, believes=believes)


def hello(part: SwitchLink, now: float, boot: int = BOOT, nonce: int = NONCE) -> Steps:
    return part.on_frame(now, wire.Switch(boot, nonce, 0, 0, 0, 0, SwitchStep.HELLO))


def ready(
    part: SwitchLink,
    now: float,
    members: int = 0b111,
    boot: int = BOOT,
    seed: bytes = SEED,
    fragments: int = 100,
) -> Steps:
    whose = boot, name_of(seed), members, VIEW.number
    return part.on_frame(now, wire.Switch(*whose, fragments, 16, SwitchStep.READY))


def grants(steps: Steps) -> list[wire.Frame]:
    return [step.frame for step in steps if isinstance(step, Send)]


def said(steps: Steps) -> list[str]:
    return [step.text for step in steps if isinstance(step, SwitchChanged) and step.text]


def enter(part: SwitchLink, now: float, view: View) -> Steps:
    part._host.view = view
    return part.enter_view(now)


# ---- grants


def test_a_hello_is_answered_with_the_view() -> None:
    part = link()
    assert grants(part.need_room(0.5, 100, 16)) == [], "nobody has asked"
    (frame,) = grants(hello(part, 1.0))
    assert (frame.header.view, frame.header.sender) == (4, 2)
    assert frame.body == wire.Switch(BOOT, NONCE, 0, 4, 100, 16, SwitchStep.GRANT)
    told, members = wire.unpack_grant(frame.tail)
    assert (told.seed, told.siphash, told.lead) == (SEED, bytes(16), 1)
    assert told.name.rstrip(b"\0") == b"h2"
    assert [(m.mac, m.number) for m in members] == [(m.mac, m.number) for m in MEMBERS]


def test_only_live_members_are_granted() -> None:
    (frame,) = grants(hello(link(3, NEXT), 1.0))
    assert [m.number for m in wire.unpack_grant(frame.tail)[1]] == [1, 3]


@pytest.mark.parametrize("what", ["unbelieved", "alone", "standing by"])
def test_who_grants_nothing(what: str) -> None:
    alone = View(4, MEMBERS, frozenset({2}), 2, seed=SEED)
    part = link(view=alone if what == "alone" else VIEW, believes=what != "unbelieved")
    if what == "standing by":
        part._host.state = NodeState.STANDBY
    assert grants(hello(part, 1.0)) == [] and part.heard


def test_a_view_is_granted_as_it_is_entered_and_the_room_as_it_is_known() -> None:
    part = link(1)
    hello(part, 1.0)
    (frame,) = grants(enter(part, 1.2, NEXT))
    body = frame.body
    assert isinstance(body, wire.Switch) and (body.number, body.nonce) == (5, NONCE)
    (frame,) = grants(part.need_room(1.5, 9, 8))
    assert isinstance(frame.body, wire.Switch) and (frame.body.fragments, frame.body.width) == (
        9,
        8,
    )


def test_grants_are_few_however_often_the_switch_asks() -> None:
    part = link()
    count = sum(len(grants(hello(part, 1 + k / 1000, nonce=k + 1))) for k in range(100))
    assert count == 2  # at once, and 50 ms later
    (frame,) = grants(part.tick(part.deadline()))
    assert isinstance(frame.body, wire.Switch) and frame.body.nonce == 100, "the newest"
    assert grants(part.tick(part.deadline())) == []


# ---- one view, one boot


def test_another_boot_gets_no_view_that_was_granted() -> None:
    """The lead asks for a new view; another member if the lead does not: it has perhaps granted nothing before."""
    lead, member = link(1), link(2)
    for part in (lead, member):
        assert grants(hello(part, 1.0))
    assert hello(lead, 2.0, boot=BOOT + 1).count(Renew()) == 1
    for at in (2.0, 3.0):
        steps = hello(member, at, boot=BOOT + 1)
        assert not grants(steps) and Renew() not in steps
    assert Renew() in hello(member, 4.0, boot=BOOT + 1)
    assert lead.granted_boot == member.granted_boot == BOOT, "which makes no sums any more"
    (frame,) = grants(enter(member, 4.1, View(5, MEMBERS, VIEW.live, 1, seed=bytes(16))))
    assert isinstance(frame.body, wire.Switch) and frame.body.boot == BOOT + 1


def test_a_grant_that_was_put_off_is_not_for_the_next_boot() -> None:
    part = link()
    assert grants(hello(part, 1.0))
    assert not grants(hello(part, 1.01)), "it is due 50 ms after the one before"
    hello(part, 1.02, boot=BOOT + 1)
    assert not grants(part.tick(1.06)), "the view was granted to the boot before"
    (frame,) = grants(enter(part, 1.1, NEXT))
    assert isinstance(frame.body, wire.Switch) and frame.body.boot == BOOT + 1


def test_an_older_boot_is_not_heard() -> None:
    """A frame of it may have been recorded."""
    part = link()
    hello(part, 1.0)
    assert hello(part, 2.0, boot=BOOT - 1, nonce=5) == []
    assert ready(part, 2.0, boot=BOOT - 1) == []
    (frame,) = grants(part.need_room(2.1, 1, 8))
    assert isinstance(frame.body, wire.Switch) and frame.body.nonce == NONCE


def test_an_older_boot_that_is_alone_is_named_once() -> None:
    """The box was started again, and its clock is slow: nobody would know why it adds no more."""
    part = link()
    hello(part, 1.0)
    part.tick(1.0 + FRESH_S)
    (text,) = said(hello(part, 5.0, boot=BOOT - 1))
    assert "set its clock" in text and said(hello(part, 6.0, boot=BOOT - 1)) == []
    assert part.find_lack(1, 8) == "no switch is heard"


def test_two_switches_at_once_are_not_used() -> None:
    part = link()
    part.need_room(0.0, 100, 16)
    hello(part, 1.0)
    ready(part, 1.1)
    assert part.find_lack(100, 16) == ""
    hello(part, 2.0, boot=BOOT - 1)
    (changed, *_) = [s for s in hello(part, 2.1) if isinstance(s, SwitchChanged) and s.warns]
    assert "two switches" in changed.text and "two switches" in part.find_lack(100, 16)
    for k in range(1, 5):
        hello(part, 2.1 + k)
        ready(part, 2.1 + k)
        part.tick(2.1 + k)
    assert part.find_lack(100, 16) == "", "the other one has gone"


# ---- ready


def test_ready_is_what_all_members_and_the_vectors_need() -> None:
    part = link()
    assert part.find_lack(100, 16) == "no switch is heard"
    part.need_room(0.0, 100, 16)
    hello(part, 1.0)
    assert "not ready for view 4" in part.find_lack(100, 16)
    ready(part, 1.1, members=0b011)
    assert part.find_lack(100, 16) == "the switch has no grant of h3"
    ready(part, 1.2, fragments=99)
    assert "room for 99 fragments of 16 bits" in part.find_lack(100, 16)
    assert SwitchChanged() in ready(part, 1.3)
    assert part.find_lack(100, 16) == "" and part.describe() == "ready"
    assert "room" in part.find_lack(100, 8)


@pytest.mark.parametrize("what", ["seed", "boot", "view"])
def test_yesterdays_ready_is_none(what: str) -> None:
    part = link()
    hello(part, 1.0)
    if what == "seed":
        ready(part, 1.1, seed=bytes(16))
    elif what == "boot":
        ready(part, 1.1)
        hello(part, 1.2, boot=BOOT + 1)
    else:
        ready(part, 1.1)
        enter(part, 1.2, NEXT)
    assert "not ready" in part.find_lack(100, 16)


def test_what_is_not_said_again_does_not_count_any_more() -> None:
    part = link()
    part.need_room(0.0, 100, 16)
    hello(part, 1.0)
    ready(part, 1.5)
    assert part.deadline() == 1.5 + FRESH_S
    hello(part, 3.0)
    assert part.tick(1.5 + FRESH_S - 0.01) == [] and part.describe() == "ready"
    assert SwitchChanged() in part.tick(1.5 + FRESH_S)
    assert "not ready" in part.describe()
    assert said(part.tick(3.0 + FRESH_S)) == ["the switch is not heard any more"]
    assert part.describe() == "" and part.deadline() == float("inf")


def test_that_it_is_there_is_said_once() -> None:
    part, other = link(), link(believes=False)
    assert said(hello(part, 1.0)) == ["a switch that adds is there, and is believed"]
    assert said(hello(part, 2.0)) == []
    (text,) = said(hello(other, 1.0))
    assert "has not been told to believe it" in text and other.describe() == text
    assert "--trust-switch" in other.find_lack(1, 8)
