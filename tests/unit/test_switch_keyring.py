# SPDX-License-Identifier: Apache-2.0
"""What a host believes of a Linux switch, and how it grants a view to it, in a network with a key."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from nicps import wire
from nicps.agent.keyring import Keyring
from nicps.auth import NetworkKey, view_key
from nicps.errors import UsageProblem
from nicps.protocol import Member, View
from nicps.switchauth import SwitchKey
from nicps.wire import SwitchStep

pytestmark = pytest.mark.unit

OWN, OTHER = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
NETWORK, SWITCH = NetworkKey(bytes(32)), SwitchKey.of(bytes(range(32)))
VIEW = View(4, (Member(1, OWN, "h1"), Member(2, OTHER, "h2")), frozenset({1, 2}), 1)


def keys(switch: SwitchKey | None = SWITCH) -> Keyring:
    made = Keyring(NETWORK, switch)
    made.enter(VIEW)
    return made


def said(sequence: int, boot: int = 9, step: SwitchStep = SwitchStep.READY) -> bytes:
    header = wire.Header(network=7, view=4, sequence=sequence)
    frame = wire.pack(header, wire.Switch(boot, 1, 3, 4, 0, 0, step))
    return SWITCH.control.sign(frame, wire.SWITCH)


def grant() -> bytes:
    tail = wire.pack_grant(
        wire.Grant(VIEW.seed, bytes(16), b"h1", 1),
        [wire.GrantMember(OWN, 1), wire.GrantMember(OTHER, 2)],
    )
    header = wire.Header(network=7, view=4, sender=1, sequence=1)
    return wire.pack(header, wire.Switch(9, 1, 0, 4, 0, 0, SwitchStep.GRANT), tail=tail)


def test_a_grant_holds_the_views_key_and_only_the_switch_reads_it() -> None:
    sent = keys().sign(grant(), OWN)
    opened = SWITCH.open(sent, OWN)
    told, _ = wire.unpack_grant(wire.unpack(opened).tail)
    siphash = view_key(NETWORK, VIEW.number, VIEW.seed).siphash
    assert told.siphash == siphash and siphash not in sent
    assert told.seed == VIEW.seed


def test_without_a_key_a_grant_is_open_and_holds_none() -> None:
    assert Keyring(None).sign(grant(), OWN) == grant()


def test_what_the_switch_says_is_taken_once() -> None:
    ring = keys()
    assert ring.admits(wire.SWITCH, said(5), OWN)
    assert not ring.admits(wire.SWITCH, said(5), OWN)
    assert not ring.admits(wire.SWITCH, said(4, step=SwitchStep.HELLO), OWN)
    assert ring.admits(wire.SWITCH, said(6), OWN)
    assert ring.refused["replayed"] == 2


def test_a_switch_that_was_started_again_counts_anew() -> None:
    ring = keys()
    assert ring.admits(wire.SWITCH, said(500), OWN)
    assert ring.admits(wire.SWITCH, said(1, boot=10), OWN)
    assert not ring.admits(wire.SWITCH, said(500), OWN), "of the one before"
    assert ring.admits(wire.SWITCH, said(1, boot=11), OWN)
    assert not ring.admits(wire.SWITCH, said(501), OWN), "longer ago"


@pytest.mark.parametrize("what", ["changed", "another key", "another address"])
def test_what_is_not_the_switchs(what: str) -> None:
    ring, frame, source = keys(), said(5), wire.SWITCH
    if what == "changed":
        frame = frame[:-1] + bytes([frame[-1] ^ 1])
    elif what == "another key":
        ring = keys(SwitchKey.of(bytes(32)))
    else:
        source = OTHER
    assert not ring.admits(source, frame, OWN) and ring.refused.total() == 1


@pytest.mark.parametrize("theirs", [SwitchKey.of(bytes(32)), None])
def test_another_key_than_the_switchs_is_told(theirs: SwitchKey | None) -> None:
    """As with a wrong file, or a switch that was started without one."""
    ring, wrong = keys(), said(5)[:-1] + b"?"
    if theirs is not None:
        wrong = theirs.control.sign(wrong, wire.SWITCH)
    for _ in range(2):
        assert not ring.admits(wire.SWITCH, wrong, OWN)
    assert not ring.find_doubt(4.0), "a cable may have spoilt them"
    assert not ring.admits(wire.SWITCH, wrong, OWN)
    told = ring.find_doubt(5.0)
    assert "is not believed" in told and "--switch-key" in told and "xdp run --key" in told
    assert ring.doubt == told and not ring.find_doubt(6.0)
    assert ring.admits(wire.SWITCH, said(6), OWN)
    assert not ring.doubt and not ring.find_doubt(70.0), "it has the right one now"


def test_a_frame_that_is_spoilt_makes_no_doubt_of_the_switch() -> None:
    ring = keys()
    for number in range(5, 30, 2):
        assert not ring.admits(wire.SWITCH, said(number)[:-1] + b"?", OWN)
        assert ring.admits(wire.SWITCH, said(number + 1), OWN)
    assert not ring.find_doubt(5.0) and not ring.doubt


def test_grants_of_others_are_for_the_switch_alone() -> None:
    ring = keys()
    assert not ring.admits(OTHER, grant(), OWN) and not ring.refused


@pytest.mark.parametrize("ring", [Keyring(None), keys(None)])
def test_who_has_no_key_for_it_hears_that_it_is_there(ring: Keyring) -> None:
    """And believes it, or not: that is not the keyring's to say."""
    assert ring.admits(wire.SWITCH, said(5), OWN)


def test_one_key_for_both_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(base64.b64encode(bytes(32)))
    file.chmod(0o600)
    with pytest.raises(UsageProblem, match="which a switch must not have"):
        Keyring.read(file, file)
