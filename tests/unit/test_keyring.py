# SPDX-License-Identifier: Apache-2.0
"""Hosts that have different keys, told to their users and not to the log again and again."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.agent.keyring import Keyring
from nicps.auth import NetworkKey
from nicps.protocol.phase import Member
from nicps.protocol.view import View

pytestmark = pytest.mark.unit

OWN, OTHER = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
KEY = NetworkKey(bytes(32))


def frame(view: int = 0) -> bytes:
    return wire.pack(wire.Header(network=7, view=view, sender=2, sequence=1), wire.Call(1))


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
