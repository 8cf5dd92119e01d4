# SPDX-License-Identifier: Apache-2.0
"""The frames by which views follow one another: VIEW and VOTE, and the items in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from nicps.wire.fields import byte_string, i8, u8, u16, u32, u64
from nicps.wire.values import NAME_BYTES


@dataclass(frozen=True, slots=True)
class View:
    """A member list is proposed, or in force (R3, R17, R18, R20). A proposal without a value asks for promises."""

    live: Annotated[int, u64("propose: whom the proposer hears; bit k - 1 is member k")]
    nonce: Annotated[int, u64("install: the fresh one of whom it is for; ask: one of who asks")]
    number: Annotated[int, u32("of the view")]
    base: Annotated[int, u32("of the view that it follows; 0 if none")]
    ballot: Annotated[int, u32("with the sender's MAC: orders proposals")]
    addressee: Annotated[int, u16("install: member that it is for; 0: who has asked")]
    members: Annotated[int, u8("entries of the list")]
    values: Annotated[int, u8("1: the value follows; 0: none yet")]
    step: Annotated[int, u8("1 propose, 2 accept, 3 install, 4 ask")]
    ended: Annotated[int, u8("install: 1 if its job has ended, 2 if it is done; 0 otherwise")] = 0
    channels: Annotated[
        int, u8("of the value: standings behind the list, of channels 1 and up")
    ] = 0
    reserved2: Annotated[int, u8("0")] = 0
    reserved3: Annotated[int, u32("0")] = 0


@dataclass(frozen=True, slots=True)
class ViewValue:
    """What a view is, besides its list: who is in, who leads, and where the job goes on."""

    live: Annotated[int, u64("members that are in; bit k - 1 is member k")] = 0
    seed: Annotated[bytes, byte_string(16, "what the view's keys are made of")] = b""
    follows: Annotated[int, u32("phase that goes on, by its old number; 0: none")] = 0
    phase: Annotated[int, u32("its number in this view")] = 0
    round: Annotated[int, u32("round that is open; whoever is in the one before commits it")] = 0
    lead: Annotated[int, u16("acts as node 1 (R22)")] = 0
    unit: Annotated[int, i8("log2 of the accumulators' unit, open round")] = 0
    saves: Annotated[
        int, u8("1: the lead writes a checkpoint of the state after the round before that one")
    ] = 0


@dataclass(frozen=True, slots=True)
class ViewMember:
    """One member of a list; the k-th is member k."""

    mac: Annotated[bytes, byte_string(6, "MAC address")]
    name: Annotated[bytes, byte_string(NAME_BYTES, "host name, UTF-8, zero padded")]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a member stands in a channel above 0 (docs/channels.md)."""

    channel: Annotated[int, u8("its number")]
    complete: Annotated[int, u8("vote: 1: has all of its closed list")]
    round_high: Annotated[int, u16("the open round's number, its high 16 bits")]
    round_low: Annotated[int, u16("the same, its low ones")]

    @classmethod
    def at(cls, channel: int, round_: int, *, complete: bool = False) -> Self:
        """That round is open in that channel."""
        return cls(channel, int(complete), round_ >> 16, round_ & 0xFFFF)

    @property
    def round(self) -> int:
        """The open round."""
        return self.round_high << 16 | self.round_low


@dataclass(frozen=True, slots=True)
class ViewChannel(Standing):
    """Where the job goes on in a channel above 0: its round that is open. `complete` is 0."""


@dataclass(frozen=True, slots=True)
class Vote:
    """R18: a member promises, accepts or has installed; a promise carries what it has accepted before."""

    nonce: Annotated[int, u64("fresh: the list that is installed must name it")]
    ballot: Annotated[int, u32("of the proposal; promised already, if the step is 0")]
    phase: Annotated[int, u32("in force here, by number; 0: none")]
    round: Annotated[int, u32("that is open here")]
    decided: Annotated[int, u32("highest decision heard of")]
    mac: Annotated[bytes, byte_string(6, "the proposer's")]
    step: Annotated[int, u8("1 promised, 2 accepted, 3 installed; 0 refused")]
    complete: Annotated[
        int,
        u8(
            "1: has all of the open round's closed list; 2: the job is over; 4: no state; 16, 32: the lead saves the"
            " state after the open round, after the one before"
        ),
    ]
    accepted_ballot: Annotated[int, u32("of the value accepted last")] = 0
    accepted_mac: Annotated[bytes, byte_string(6, "of that ballot's proposer")] = b""
    members: Annotated[int, u8("entries of the list accepted")] = 0
    values: Annotated[int, u8("1: the value accepted follows")] = 0
    channels: Annotated[int, u8("of that value: standings behind its list")] = 0
    standings: Annotated[int, u8("standings at the end: of this member in channels 1 and up")] = 0
    reserved: Annotated[int, u16("0")] = 0
