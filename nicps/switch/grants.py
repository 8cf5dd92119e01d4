# SPDX-License-Identifier: Apache-2.0
"""The members' frames to a Linux switch that adds: GRANT frames, checked and taken apart (docs/linux-switch.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from nicps import wire
from nicps.auth import SIPHASH_BYTES
from nicps.errors import WireError
from nicps.protocol.phase import Member
from nicps.protocol.view import View, safe_name
from nicps.switchauth import SwitchKey, Unsealed

_NO_KEY = bytes(SIPHASH_BYTES)
_WIDTHS = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Granted:
    """A list as its members grant it. `macs`: of the live members, in order of their numbers."""

    number: int
    seed: bytes
    lead: int
    macs: tuple[tuple[int, bytes], ...]
    siphash: bytes | None = field(repr=False)

    @property
    def view(self) -> View:
        """The view as a switch knows it: without members that are not live, and without names."""
        live = frozenset(number for number, _ in self.macs)
        members = tuple(Member(number, mac, "") for number, mac in self.macs)
        return View(self.number, members, live, self.lead, seed=self.seed)

    @property
    def live(self) -> dict[int, bytes]:
        """MAC addresses by number."""
        return dict(self.macs)


@dataclass(frozen=True, slots=True)
class Grant:
    """The grant of one member: `number`, `name` and the room that it asks for; `fragments` is 0 if it does not know."""

    granted: Granted
    boot: int
    nonce: int
    number: int
    name: str
    fragments: int
    width: int


class Refused(WireError):
    """A grant that is not valid. `hint`: it tells the user which setting is wrong."""

    def __init__(self, message: str, *, hint: bool = False) -> None:
        super().__init__(message)
        self.hint = hint


def read_grant(frame: bytes, source: bytes, network: int, key: SwitchKey | None) -> Grant:
    """Take a GRANT apart.

    Args:
        frame: from the version byte on.
        source: MAC address that it came from.

    Raises:
        Refused: it is not sealed correctly, or not made by a live member of the list that it names.
        WireError: it is not a frame of ours.
    """
    sealed = _is_sealed(frame)
    if key is not None:
        if not sealed:
            raise Refused(
                f"{wire.mac_text(source)} has granted without the switch's key: give its `nicps join` --switch-key",
                hint=True,
            )
        try:
            frame = key.open(frame, source)
        except Unsealed as problem:
            raise Refused(str(problem), hint=True) from None
    elif sealed:
        raise Refused(
            f"{wire.mac_text(source)} has granted with a switch's key: start this switch with that --key",
            hint=True,
        )
    unpacked = wire.unpack(frame)
    body, header = unpacked.body, unpacked.header
    if not isinstance(body, wire.Switch) or header.network != network:
        raise Refused("a grant for another network")
    told, members = wire.unpack_grant(unpacked.tail)
    macs = tuple((member.number, member.mac) for member in members)
    numbers = [number for number, _ in macs]
    if (
        numbers != sorted(set(numbers))
        or not 0 < numbers[0] <= numbers[-1] <= wire.MAX_MEMBERS
        or len({mac for _, mac in macs}) != len(macs)
        or not all(any(mac) for _, mac in macs)
        or told.lead not in numbers
        or dict(macs).get(header.sender) != source
        or not body.number
    ):
        raise Refused(f"a grant from {wire.mac_text(source)} that cannot be meant")
    if len(macs) < 2:
        raise Refused("a grant of one member, which adds for itself")
    name = safe_name(told.name.rstrip(b"\0").decode(errors="replace"), source)
    siphash = None if told.siphash == _NO_KEY else told.siphash
    if siphash is not None and key is None:
        raise Refused(
            f"{wire.mac_text(source)} ({name}) has sent the key of a view in the clear: its network has a key, and this"
            " switch none; start both with a switch's key",
            hint=True,
        )
    if body.fragments and body.width not in _WIDTHS:
        raise Refused(f"a grant for lanes of {body.width} bits")
    return Grant(
        Granted(body.number, told.seed, told.lead, macs, siphash),
        body.boot,
        body.nonce,
        header.sender,
        name,
        body.fragments,
        body.width,
    )


def _is_sealed(frame: bytes) -> bool:
    """Whether the tail is longer than any that is open: nonce and tag are not a whole number of members."""
    try:
        wire.unpack_grant(wire.unpack(frame).tail)
    except WireError:
        return True
    return False
