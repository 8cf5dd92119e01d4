# SPDX-License-Identifier: Apache-2.0
"""Every frame of nicps: the one definition of the wire.

The dataclasses below *are* the formats. Each field is annotated with its width on the wire; `Layout.of` derives
offsets, packing and tables from that, and `nicps.wiregen` derives the C and P4 headers. All numbers are big-endian,
every field is naturally aligned from the first byte after the Ethernet header, nothing is a bit-field.
Nobody changes one of them; but those of a token frame are not frozen, which would take seven times as long to make.

A frame is Ethernet (to all or to a multicast group, EtherType `ETHERTYPE`), `Header`, the body of its type, that body's
repeated items, and a tail (`Frame`). Only the standard library is used here.

Source: docs/protocol.md; rules R1 to R18 in docs/rules.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import starmap
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

from nicps.errors import WireError

VERSION = 1
ETHERTYPE = 0x88B5  # IEEE 802 local experimental
ETHERNET_BYTES = 14
BROADCAST = b"\xff" * 6
GROUP = bytes.fromhex("036e69637073")  # multicast, locally administered; its end is "nicps"

MAX_MEMBERS = 64  # one seen-bit for each in 64 bits, and 64-bit sums that cannot overflow
PAYLOAD_BYTES = 1440  # of a fragment: 360, 720 or 1440 lanes
BLOCK_LANES = 1440  # 64-bit accumulators in one block of the map
MAX_FRAME_BYTES = 1500  # the LAN's usual MTU
#: The MTU that an interface needs: that of our longest frame.
LEAST_MTU = MAX_FRAME_BYTES
NAME_BYTES = 14

#: Where a switch adds: fragments that a holder sends at a time. The switch has room for twice as many sums.
QUANTUM = 256
SWITCH = bytes.fromhex("026e69637073")  # its MAC address, of the sums that it sends

#: Exponent of lanes of which some are not finite.
NOT_FINITE = 127

#: Largest shift by lane width: 64 members' `lane << shift` cannot overflow 64 bits. Width 0 is raw bytes.
MAX_SHIFT = {0: 0, 8: 50, 16: 42, 32: 26}


def lanes_per_fragment(width: int) -> int:
    """Lanes of `width` bits in one fragment; bytes where the width is 0."""
    return PAYLOAD_BYTES if width == 0 else PAYLOAD_BYTES * 8 // width


def fragments_per_block(width: int) -> int:
    """Fragments that share a block of `BLOCK_LANES` accumulators: 1, 2, 4 for lanes of 8, 16, 32 bits; 8 if raw."""
    return {8: 1, 16: 2, 32: 4, 0: 8}[width]


class Wire(NamedTuple):
    """How one field lies on the wire: `struct` code, bytes, C and P4 spelling and what it means."""

    code: str
    size: int
    c: str
    doc: str

    @property
    def align(self) -> int:
        """Alignment in bytes: that of the number, one for byte strings."""
        return 1 if self.code.endswith("s") else self.size


def _u8(doc: str) -> Wire:
    return Wire("B", 1, "__u8", doc)


def _i8(doc: str) -> Wire:
    return Wire("b", 1, "__s8", doc)


def _u16(doc: str) -> Wire:
    return Wire("H", 2, "__be16", doc)


def _u32(doc: str) -> Wire:
    return Wire("I", 4, "__be32", doc)


def _u64(doc: str) -> Wire:
    return Wire("Q", 8, "__be64", doc)


def _bytes(size: int, doc: str) -> Wire:
    return Wire(f"{size}s", size, "__u8", doc)


class FrameType(IntEnum):
    """The header's `type`."""

    CALL = 1  # R1, R20: who takes part, who comes back?
    ANSWER = 2  # R2, R20: I do
    VIEW = 3  # R3, R17, R20: a member list is proposed, or in force
    DECISION = 4  # R5 to R7, R14: node 1 decides, all acknowledge
    ACK = 5
    TOKEN = 6  # R9, R10
    FRAGMENT = 7  # R10, R11
    WANT = 8  # a member has become ready while the token is parked
    FAIL = 9  # a member cannot go on, nor can the job
    VOTE = 10  # R18: what a member says of a proposed list
    LEAVE = 11  # R17: a member departs by itself
    PROBE = 12  # `nicps doctor --network` asks, or sends one frame of a train
    ECHO = 13  # what a host has counted of a train
    CONTRIBUTION = 14  # in stripes: a member's part of a sum, to the aggregator
    SUM = 15  # in stripes: the aggregator's, to all, or to who has asked
    ASK = 16  # in stripes: a member lacks that sum
    LACKING = 17  # in stripes: it cannot be made yet, and whose part is lacking


# Combined, flags and marks are plain numbers: an `IntFlag` is slow to test, and every frame is tested.
class Flag(IntEnum):
    """The header's `flags`."""

    REPEAT = 1  # R16: sent before
    BOUNCED = 2  # handed on by the kernel
    PARKED = 4  # the owner keeps the token: nothing to do
    REPAIR = 8  # a fragment sent again on request
    TOKEN_WANTED = 16  # WANT: hand me the token
    ADD = 32  # a fragment that the switch is to add; of sender 0, the sum
    ANSWER = 64  # made by the XDP program out of a frame that came: it has numbers of its own
    COMPLETE = 128  # WANT: this member has all that the round's closed list comes to


class TokenState(IntEnum):
    """The token's `state`: gradients may still come, or the list is closed."""

    OPEN = 0
    CLOSING = 1


class Mark(IntEnum):
    """A member's `marks` in the token, about the open round."""

    CONTRIBUTED = 1
    COMPLETE = 2  # has every fragment of the list
    SKIPPED = 4  # had a gradient that does not fit the unit: asks for a larger one


class PhaseKind(IntEnum):
    """What a decision starts: a series of rounds, except FINISH and STOP."""

    HANDOUT = 1  # R5, R6: raw bytes of one member to all
    TRAIN = 2  # R8 to R13
    TEST = 3  # R15: one round of two lanes, succeeded and failed
    FINISH = 4  # R14: save the model; the acknowledgement tells what there is to collect
    STOP = 5  # back to standby, after the end or because the job failed


class ViewStep(IntEnum):
    """Of a VIEW frame, and of the VOTE that answers it."""

    PROPOSE = 1  # R17: somebody has left; promise to follow
    ACCEPT = 2  # R18: this list, if a majority agrees
    INSTALL = 3  # R3, R18: it is in force
    ASK = 4  # R4: a switch's controller asks which one is in force


class Ending(IntEnum):
    """What has become of a view's job, for who was not heard when it ended."""

    NONE = 0  # it goes on
    ENDED = 1  # it was stopped
    DONE = 2  # it has been trained to its end


class Stage(IntEnum):
    """How far a host is that answers a call."""

    NOTHING = 0  # it has nothing of the job
    FILES = 1  # it has the job's files; its training program starts
    WAITING = 2  # its training program waits for the state
    ASKS = 3  # it only wants to be told which view is in force


class ProbeStep(IntEnum):
    """Of a PROBE frame."""

    ASK = 1  # count the train of this nonce from now on, and say what was counted so far
    TRAIN = 2  # one of many, as long as a fragment: counted in the kernel, and dropped


@dataclass(slots=True)
class Header:
    """Common to all frames of ours; follows the Ethernet header."""

    version: Annotated[int, _u8("format version, 1")] = VERSION
    type: Annotated[int, _u8("frame type")] = 0
    flags: Annotated[int, _u16("flag mask")] = 0
    network: Annotated[int, _u32("hash of the network's name")] = 0
    view: Annotated[int, _u32("number of the member list; 0 before any")] = 0
    round: Annotated[int, _u32("round that the frame belongs to")] = 0
    sender: Annotated[int, _u16("member number from 1; 0 if none yet")] = 0
    length: Annotated[int, _u16("bytes from version on, without padding")] = 0
    sequence: Annotated[int, _u32("sender's frame counter; a repeat has a new one")] = 0
    tag: Annotated[int, _u64("authentication tag; 0 on a trusted LAN")] = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """One frame's worth of a gradient (or of a hand-out); `PAYLOAD_BYTES` follow, zero padded."""

    index: Annotated[int, _u32("place in the contribution, from 0")]
    fragments: Annotated[int, _u32("fragments in the contribution")]
    lanes: Annotated[int, _u16("lanes in the payload, zeros included; bytes if raw")]
    width: Annotated[int, _u8("bits of a lane: 32, 16, 8; 0 is raw bytes")]
    shift: Annotated[int, _u8("left shift of every lane before it is added")]
    samples: Annotated[int, _u32("samples in the whole gradient")] = 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """One frame's worth of a gradient in stripes, to its aggregator; `PAYLOAD_BYTES` of lanes follow.

    It explains itself: it may arrive before the aggregator's agent knows that the list is closed.
    """

    members: Annotated[int, _u64("the closed list; bit k - 1 is member k")]
    index: Annotated[int, _u32("place in the vector, from 0")]
    fragments: Annotated[int, _u32("fragments in the vector")]
    number: Annotated[int, _u32("0")]
    width: Annotated[int, _u8("bits of a lane: 32, 16, 8")]
    exponent: Annotated[int, _i8("of the lanes: value = lane * 2**exponent; 127: not finite")]
    unit: Annotated[int, _i8("log2 of what all sums of the round are multiples of")]
    reserved: Annotated[int, _u8("0")] = 0


@dataclass(frozen=True, slots=True)
class Sum(Contribution):
    """The sum of the list's contributions, as wide as one of them. The lanes follow."""


@dataclass(frozen=True, slots=True)
class Ask(Contribution):
    """A member asks for a sum; `number` is the question's. As long as the answer, which is written over it."""


@dataclass(frozen=True, slots=True)
class Lacking(Contribution):
    """The answer where a sum is not made yet; `members` have not contributed. `PAYLOAD_BYTES` of no meaning follow."""


@dataclass(slots=True)
class Token:
    """The right to broadcast (R9, R10), and the state of the open round."""

    generation: Annotated[int, _u32("raised by whoever creates a token")]
    hop: Annotated[int, _u32("raised by every hand-on")]
    owner: Annotated[int, _u16("number of the member that may take it")]
    state: Annotated[int, _u8("0 open, 1 closing")]
    members: Annotated[int, _u8("entries that follow")]
    idle: Annotated[int, _u16("hops since anything changed")]
    ranges: Annotated[int, _u16("missing ranges after the entries")]
    sent: Annotated[int, _u32("distinct fragments sent in the open round")]
    unit: Annotated[int, _i8("log2 of the accumulators' unit, open round")]
    unit_before: Annotated[int, _i8("the same, of the round committed last")]
    stripe: Annotated[int, _u16("0; room for several tokens")] = 0
    listed: Annotated[int, _u64("closing: whose gradients are in; bit k - 1 is member k")] = 0
    settled: Annotated[int, _u32("where a switch adds: sums from the first on that all have")] = 0
    reserved: Annotated[int, _u32("0")] = 0


@dataclass(slots=True)
class Entry:
    """One member's line in the token; the k-th is that of member k."""

    samples_before: Annotated[int, _u32("samples counted in the round committed last")] = 0
    samples: Annotated[int, _u32("samples counted in the open round")] = 0
    ready: Annotated[
        int,
        _u32("samples worked so far, not yet sent; where a switch adds a closed list: sums here"),
    ] = 0
    digest: Annotated[
        int, _u32("of weights, buffers and optimizer after round `read`; 0: none")
    ] = 0
    read: Annotated[int, _u16("last round read out and applied, its low 16 bits")] = 0
    marks: Annotated[int, _u8("mark mask")] = 0
    unit: Annotated[int, _i8("log2 of the unit wanted for the next round")] = -128


@dataclass(frozen=True, slots=True)
class Range:
    """Fragments that some member lacks; only their sender repairs. Of sums that a switch adds, all send again."""

    first: Annotated[int, _u32("first missing fragment")]
    count: Annotated[int, _u16("how many in a row")]
    sender: Annotated[int, _u16("member that sent them; of sums, the member that lacks them")]


@dataclass(frozen=True, slots=True)
class Call:
    """R1: the starter asks who takes part; the tail is its name. R20: the lead calls standby hosts; it is the job's."""

    nonce: Annotated[
        int, _u64("names this formation; 0: the job admits nobody, and no answer is wanted")
    ]
    view: Annotated[int, _u32("in force at the caller; 0 if it starts a network")] = 0
    ballot: Annotated[int, _u32("under which that view was installed")] = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """R2, R20: a host takes part. The tail is its name."""

    nonce: Annotated[int, _u64("of the call")]
    fresh: Annotated[int, _u64("random: the list that takes this host in must name it")] = 0
    view: Annotated[int, _u32("highest view this host has been in")] = 0
    stage: Annotated[
        int, _u8("0 nothing of the job, 1 its files, 2 a training program that waits, 3 only asks")
    ] = 0
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0


@dataclass(frozen=True, slots=True)
class View:
    """A member list is proposed, or in force (R3, R17, R18, R20). A proposal without a value asks for promises."""

    live: Annotated[int, _u64("propose: whom the proposer hears; bit k - 1 is member k")]
    nonce: Annotated[int, _u64("install: the fresh one of whom it is for; ask: one of who asks")]
    number: Annotated[int, _u32("of the view")]
    base: Annotated[int, _u32("of the view that it follows; 0 if none")]
    ballot: Annotated[int, _u32("with the sender's MAC: orders proposals")]
    addressee: Annotated[int, _u16("install: member that it is for; 0: who has asked")]
    members: Annotated[int, _u8("entries of the list")]
    values: Annotated[int, _u8("1: the value follows; 0: none yet")]
    step: Annotated[int, _u8("1 propose, 2 accept, 3 install, 4 ask")]
    ended: Annotated[int, _u8("install: 1 if its job has ended, 2 if it is done; 0 otherwise")] = 0
    reserved2: Annotated[int, _u16("0")] = 0
    reserved3: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class ViewValue:
    """What a view is, besides its list: who is in, who leads, and where the job goes on."""

    live: Annotated[int, _u64("members that are in; bit k - 1 is member k")] = 0
    seed: Annotated[bytes, _bytes(16, "what the view's keys are made of")] = b""
    follows: Annotated[int, _u32("phase that goes on, by its old number; 0: none")] = 0
    phase: Annotated[int, _u32("its number in this view")] = 0
    round: Annotated[int, _u32("round that is open; whoever is in the one before commits it")] = 0
    lead: Annotated[int, _u16("acts as node 1 (R22)")] = 0
    unit: Annotated[int, _i8("log2 of the accumulators' unit, open round")] = 0
    reserved: Annotated[int, _u8("0")] = 0


@dataclass(frozen=True, slots=True)
class ViewMember:
    """One member of a list; the k-th is member k."""

    mac: Annotated[bytes, _bytes(6, "MAC address")]
    name: Annotated[bytes, _bytes(NAME_BYTES, "host name, UTF-8, zero padded")]


@dataclass(frozen=True, slots=True)
class Vote:
    """R18: a member promises, accepts or has installed; a promise carries what it has accepted before."""

    nonce: Annotated[int, _u64("fresh: the list that is installed must name it")]
    ballot: Annotated[int, _u32("of the proposal; promised already, if the step is 0")]
    phase: Annotated[int, _u32("in force here, by number; 0: none")]
    round: Annotated[int, _u32("that is open here")]
    decided: Annotated[int, _u32("highest decision heard of")]
    mac: Annotated[bytes, _bytes(6, "the proposer's")]
    step: Annotated[int, _u8("1 promised, 2 accepted, 3 installed; 0 refused")]
    complete: Annotated[
        int, _u8("1: has all of the open round's closed list; 2: the job is over; 4: no state")
    ]
    accepted_ballot: Annotated[int, _u32("of the value accepted last")] = 0
    accepted_mac: Annotated[bytes, _bytes(6, "of that ballot's proposer")] = b""
    members: Annotated[int, _u8("entries of the list accepted")] = 0
    values: Annotated[int, _u8("1: the value accepted follows")] = 0
    reserved: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Node 1 opens the next phase. The tail is its settings as JSON. In force once all have acknowledged."""

    number: Annotated[int, _u32("1, 2, ... in a view")]
    generation: Annotated[int, _u32("of the token that the phase starts with")]
    phase: Annotated[int, _u8("1 hand-out, 2 train, 3 test, 4 finish, 5 stop")]
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0
    reserved3: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """A member has heard a decision; once it is prepared, the tail may hold an answer as JSON."""

    number: Annotated[int, _u32("of the decision")]
    prepared: Annotated[int, _u8("1: prepared; 0: heard, still preparing")]
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Want:
    """A member without the token tells what it has; with TOKEN_WANTED the holder of a parked one hands it over."""

    ready: Annotated[int, _u32("samples worked so far in the round")]
    read: Annotated[int, _u32("last round read out and applied")]
    digest: Annotated[int, _u32("of the state after that round; 0: none")] = 0
    lacks: Annotated[int, _u32("entries that follow: what is sent again and does not come")] = 0


@dataclass(frozen=True, slots=True)
class Lack:
    """A member's fragments of the open round that the sender of a WANT lacks, and does not get."""

    count: Annotated[int, _u32("fragments of that member that are lacking")]
    member: Annotated[int, _u16("member that sends them")]
    reserved: Annotated[int, _u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """A member cannot go on, nor can the job anywhere; the tail says why, in one line. Or its user cancels the job."""

    cancels: Annotated[
        int, _u8("1: the user cancels the job, which is saved first; 0 otherwise")
    ] = 0
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0
    reserved3: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """R17: this member departs; the others go on. The tail says why, in one line."""

    reserved: Annotated[int, _u64("0")] = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """A host measures the LAN, in no view; the tail of a train's frame is as long as a fragment's payload."""

    nonce: Annotated[int, _u64("names the train")]
    number: Annotated[int, _u32("of the question, or in the train")]
    step: Annotated[int, _u8("1 ask, 2 one frame of the train")]
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """The answer to a question: what has come of that train. The tail is the host's name."""

    nonce: Annotated[int, _u64("of the train")]
    first_ns: Annotated[int, _u64("when its first frame came, by this host's own clock")]
    last_ns: Annotated[int, _u64("the same of its last")]
    count: Annotated[int, _u32("frames of it that came")]
    number: Annotated[int, _u32("of the question")]
    busy: Annotated[int, _u8("1: a job is under way here, or a measurement of its own")] = 0
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0
    reserved3: Annotated[int, _u32("0")] = 0


Body: TypeAlias = (
    Call
    | Answer
    | View
    | Vote
    | Decision
    | Ack
    | Token
    | Fragment
    | Want
    | Fail
    | Leave
    | Probe
    | Echo
    | Contribution
    | Sum
    | Ask
    | Lacking
)
Item: TypeAlias = Entry | Range | Lack | ViewValue | ViewMember

#: Type -> body, then the repeated items with the body's field that counts them.
FORMATS: dict[FrameType, tuple[type[Body], tuple[tuple[type[Item], str], ...]]] = {
    FrameType.CALL: (Call, ()),
    FrameType.ANSWER: (Answer, ()),
    FrameType.VIEW: (View, ((ViewValue, "values"), (ViewMember, "members"))),
    FrameType.DECISION: (Decision, ()),
    FrameType.ACK: (Ack, ()),
    FrameType.TOKEN: (Token, ((Entry, "members"), (Range, "ranges"))),
    FrameType.FRAGMENT: (Fragment, ()),
    FrameType.WANT: (Want, ((Lack, "lacks"),)),
    FrameType.FAIL: (Fail, ()),
    FrameType.VOTE: (Vote, ((ViewValue, "values"), (ViewMember, "members"))),
    FrameType.LEAVE: (Leave, ()),
    FrameType.PROBE: (Probe, ()),
    FrameType.ECHO: (Echo, ()),
    FrameType.CONTRIBUTION: (Contribution, ()),
    FrameType.SUM: (Sum, ()),
    FrameType.ASK: (Ask, ()),
    FrameType.LACKING: (Lacking, ()),
}
_TYPE_OF: dict[type[Any], FrameType] = {body: kind for kind, (body, _) in FORMATS.items()}


class Layout(NamedTuple):
    """Where a dataclass's fields lie: names, `Wire`s, byte offsets, the compiled `struct.Struct`, and their values."""

    names: tuple[str, ...]
    wires: tuple[Wire, ...]
    offsets: tuple[int, ...]
    struct: struct.Struct
    values: Callable[[Any], tuple[Any, ...]]

    @staticmethod
    def of(cls: type[Any]) -> Layout:
        """Layout of one of this module's dataclasses."""
        return _LAYOUTS.get(cls) or _LAYOUTS.setdefault(cls, Layout._derive(cls))

    @staticmethod
    def _derive(cls: type[Any]) -> Layout:
        hints = get_type_hints(cls, include_extras=True)
        names = tuple(field.name for field in fields(cls))
        wires = tuple(hints[name].__metadata__[0] for name in names)
        offsets, at = [], 0
        for name, wire in zip(names, wires, strict=True):
            assert at % wire.align == 0, f"{cls.__name__}.{name} is not aligned at {at}"
            offsets.append(at)
            at += wire.size
        form = struct.Struct(">" + "".join(w.code for w in wires))
        one = attrgetter(names[0])
        values = attrgetter(*names) if len(names) > 1 else lambda value: (one(value),)
        return Layout(names, wires, tuple(offsets), form, values)


_LAYOUTS: dict[type[Any], Layout] = {}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of ours, taken apart.

    `items` holds one tuple for each kind of repeated item of the type (`FORMATS`). `tail` is what follows: a
    fragment's payload, a decision's JSON, a name or a reason as UTF-8.
    """

    header: Header
    body: Body
    items: tuple[tuple[Item, ...], ...] = ()
    tail: bytes = b""

    @property
    def type(self) -> FrameType:
        """The frame's type, as an enum."""
        return _TYPE_OF[type(self.body)]

    def pack(self) -> bytes:
        """As it lies on the wire (`pack`)."""
        return pack(self.header, self.body, *self.items, tail=self.tail)


def pack_one(value: Any) -> bytes:
    """Bytes of one header, body or item.

    Raises:
        WireError: a value does not fit its field.
    """
    layout = Layout.of(type(value))
    try:
        return layout.struct.pack(*layout.values(value))
    except struct.error as error:
        raise WireError(f"{type(value).__name__} does not fit the wire: {error}: {value}") from None


def pack(header: Header, body: Body, *items: Sequence[Item], tail: bytes = b"") -> bytes:
    """A frame from its version byte on; `type` and `length` of the header are filled in here.

    Raises:
        WireError: a value does not fit its field, or the frame is longer than `MAX_FRAME_BYTES`.
    """
    rest = pack_one(body) + b"".join([pack_one(item) for group in items for item in group]) + tail
    length = HEADER_BYTES + len(rest)
    if length > MAX_FRAME_BYTES:
        raise WireError(
            f"a {type(body).__name__} frame of {length} bytes is longer than {MAX_FRAME_BYTES}"
        )
    h, kind = header, _TYPE_OF[type(body)]
    whose = (h.network, h.view, h.round, h.sender)
    return pack_one(Header(h.version, kind, h.flags, *whose, length, h.sequence, h.tag)) + rest


def unpack_header(frame: bytes) -> Header:
    """The header of a frame; checks version and length.

    Raises:
        WireError: too short, another version, or cut off.
    """
    layout = Layout.of(Header)
    if len(frame) < layout.struct.size:
        raise WireError(f"{len(frame)} bytes are too few for a header")
    header = Header(*layout.struct.unpack_from(frame))
    if header.version != VERSION:
        raise WireError(f"version {header.version} is not {VERSION}")
    if not layout.struct.size <= header.length <= len(frame):
        raise WireError(f"length {header.length} does not fit a frame of {len(frame)} bytes")
    return header


def unpack(frame: bytes) -> Frame:
    """Take a frame apart; Ethernet padding after `length` is ignored.

    Raises:
        WireError: it is not a frame of ours, of an unknown type, cut off, or longer than `MAX_FRAME_BYTES`.
    """
    header = unpack_header(frame)
    if header.length > MAX_FRAME_BYTES:
        raise WireError(f"length {header.length} is more than {MAX_FRAME_BYTES}")
    form = FORMATS.get(header.type)  # type: ignore[call-overload]
    if form is None:
        raise WireError(f"type {header.type} is unknown")
    body_class, groups = form
    at, end = HEADER_BYTES, header.length

    def take(cls: type[Any], count: int) -> tuple[Any, ...]:
        nonlocal at
        size = Layout.of(cls).struct.size
        if at + count * size > end:
            at += (end - at) // size * size
            raise WireError(
                f"{body_class.__name__} frame is cut off in {cls.__name__} at byte {at}"
            )
        first, at = at, at + count * size
        return tuple(starmap(cls, Layout.of(cls).struct.iter_unpack(frame[first:at])))

    (body,) = take(body_class, 1)
    items = tuple(take(cls, getattr(body, count)) for cls, count in groups)
    return Frame(header, body, items, bytes(frame[at:end]))


def ethernet(source: bytes, frame: bytes, destination: bytes = BROADCAST) -> bytes:
    """The frame behind its Ethernet header, from `source` to all, or to a multicast group (6 bytes each)."""
    return destination + source + struct.pack(">H", ETHERTYPE) + frame


def network_id(name: str) -> int:
    """The header's `network` for a network's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def mac_text(mac: bytes) -> str:
    """`02:00:00:00:00:01` for six bytes."""
    return mac.hex(":")


HEADER_BYTES = Layout.of(Header).struct.size
FRAGMENT_HEADER_BYTES = HEADER_BYTES + Layout.of(Fragment).struct.size
CONTRIBUTION_HEADER_BYTES = HEADER_BYTES + Layout.of(Contribution).struct.size
TOKEN_HEADER_BYTES = HEADER_BYTES + Layout.of(Token).struct.size


def max_ranges(members: int) -> int:
    """How many missing ranges fit a token of that many members."""
    room = MAX_FRAME_BYTES - TOKEN_HEADER_BYTES - members * Layout.of(Entry).struct.size
    return room // Layout.of(Range).struct.size
