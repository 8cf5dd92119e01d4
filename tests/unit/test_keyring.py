# SPDX-License-Identifier: Apache-2.0
"""Hosts that have different keys, told to their users and not to the log again and again."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.agent.keyring import Keyring
from nicps.auth import NetworkKey, Sequences
from nicps.protocol.phase import Member
from nicps.protocol.view import View

pytestmark = pytest.mark.unit

OWN, OTHER = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
KEY = NetworkKey(bytes(32))


def frame(view: int = 0, sequence: int = 1) -> bytes:
    header = wire.Header(network=7, view=view, sender=2, sequence=sequence % (1 << 32))
    return wire.pack(header, wire.Call(1))


@pytest.fixture
def keys() -> Keyring:
    return Keyring(KEY)


@pytest.mark.parametrize("other", [Keyring(NetworkKey(bytes(31) + b"x")), Keyring(None)])
def test_another_key_or_none_is_told(keys: Keyring, other: Keyring) -> None:
    assert not keys.find_doubt(0.0) and not keys.doubt
    assert not keys.admits(OTHER, other.sign(frame(), OTHER), OWN)
    told = keys.find_doubt(5.0)
    assert ": 1 so far; " in told and "the same on all hosts?" in told
    assert not keys.find_doubt(200.0) and keys.doubt == told
    assert not keys.find_doubt(500.0) and not keys.doubt, "there have been no more"


def test_a_flood_is_a_line_a_minute(keys: Keyring) -> None:
    told = []
    for tick in range(600):
        if tick < 300:
            keys.admits(OTHER, frame(), OWN)
        told.append(keys.find_doubt(tick / 2))
    said = {tick / 2: text for tick, text in enumerate(told) if text}
    assert list(said) == [0.0, 60.0, 120.0, 180.0], "the last one tells what came after the third"
    assert ": 300 so far; " in said[180.0]


def test_members_make_no_doubt(keys: Keyring) -> None:
    """Nor do frames of a view with another seed, as of a host that has slept through its end."""
    members = tuple(Member(k, mac, f"h{k}") for k, mac in ((1, OWN), (2, OTHER)))
    old = Keyring(KEY)
    keys.enter(View(3, members, frozenset({1, 2}), 1))
    old.enter(View(3, members, frozenset({1, 2}), 1, seed=bytes(range(16))))
    assert keys.admits(OTHER, KEY.sign(frame(), OTHER), OWN)
    assert not keys.admits(OTHER, old.sign(frame(3), OTHER), OWN)
    assert keys.refused == {"forged": 1} and not keys.doubt and not keys.find_doubt(0.0)


@pytest.mark.parametrize("kind", ["lacking", "token", "fragment"])
def test_what_the_kernel_has_checked_is_not_checked_again(keys: Keyring, kind: str) -> None:
    """Its tags are SipHash; a control frame with such a tag is forged."""
    members = tuple(Member(k, mac, f"h{k}") for k, mac in ((1, OWN), (2, OTHER)))
    keys.enter(View(3, members, frozenset({1, 2}), 1))
    header = wire.Header(network=7, view=3, sender=2, sequence=1, tag=1 << 60)
    lacking = wire.pack(header, wire.Lacking(1, 0, 1, 1, 16, 0, 0), tail=bytes(wire.PAYLOAD_BYTES))
    checked = bytearray(lacking)
    checked[1] = wire.FrameType[kind.upper()]
    assert keys.admits(OTHER, bytes(checked), OWN)
    checked[1] = wire.FrameType.CALL
    assert not keys.admits(OTHER, bytes(checked), OWN)


def in_view(number: int, keys: Keyring) -> Keyring:
    members = tuple(Member(k, mac, f"h{k}") for k, mac in ((1, OWN), (2, OTHER)))
    keys.enter(View(number, members, frozenset({1, 2}), 1))
    return keys


@pytest.mark.parametrize("first", [0, 1 << 31, (1 << 32) - 5])
def test_a_key_is_spent_before_an_old_control_frame_could_come_again(first: int) -> None:
    """Of small rounds, in which the kernel signs fewer frames than the agent: numbers come round after 2^31."""
    sender, receiver = in_view(3, Keyring(KEY)), in_view(3, Keyring(KEY))
    old, at = sender.sign(frame(3, first), OTHER), first
    assert receiver.admits(OTHER, old, OWN) and not sender.is_spent(5, 6)
    while not sender.is_spent(5, 6):
        at += Sequences.NUMBERS // 3
        assert receiver.admits(OTHER, sender.sign(frame(3, at), OTHER), OWN)
        assert at < first + (1 << 31), "it may come again"
    assert not receiver.admits(OTHER, old, OWN)
    in_view(4, sender)
    assert not sender.is_spent(5, 6), "the next view has another key"
    assert sender.is_spent(5, Sequences.NUMBERS)


def test_frames_of_other_views_or_made_earlier_do_not_spend_a_key() -> None:
    keys = in_view(4, in_view(3, Keyring(KEY)))
    numbers = ((4, 100), (4, 99), (0, Sequences.NUMBERS), (3, 2 * Sequences.NUMBERS), (4, 107))
    for view, sequence in numbers:
        keys.sign(frame(view, 100 + sequence), OTHER)
    assert keys.numbers == 7
    assert not Keyring(None).is_spent(0)
