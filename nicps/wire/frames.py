# SPDX-License-Identifier: Apache-2.0
"""The frames, field by field: header, bodies, and the items that are repeated in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from nicps.wire.fields import byte_string, i8, u8, u16, u32, u64
from nicps.wire.values import NAME_BYTES, VERSION, FrameType
from nicps.wire.views import Standing, View, ViewChannel, ViewMember, ViewValue, Vote


@dataclass(slots=True)
class Header:
    """Common to all frames of ours; follows the Ethernet header."""

    version: Annotated[int, u8("format version, 1")] = VERSION
    type: Annotated[int, u8("frame type")] = 0
    flags: Annotated[int, u16("flag mask; bits 13 to 15 are the channel's number")] = 0
    network: Annotated[int, u32("hash of the network's name")] = 0
    view: Annotated[int, u32("number of the member list; 0 before any")] = 0
    round: Annotated[int, u32("round that the frame belongs to")] = 0
    sender: Annotated[int, u16("member number from 1; 0 if none yet")] = 0
    length: Annotated[int, u16("bytes from version on, without padding")] = 0
    sequence: Annotated[int, u32("sender's frame counter; a repeat has a new one")] = 0
    tag: Annotated[int, u64("authentication tag; 0 on a trusted LAN")] = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """One frame's worth of a gradient (or of a hand-out); `PAYLOAD_BYTES` follow, zero padded."""

    index: Annotated[int, u32("place in the contribution, from 0")]
    fragments: Annotated[int, u32("fragments in the contribution")]
    lanes: Annotated[int, u16("lanes in the payload, zeros included; bytes if raw")]
    width: Annotated[int, u8("bits of a lane: 32, 16, 8; 0 is raw bytes")]
    shift: Annotated[int, u8("left shift of every lane before it is added")]
    samples: Annotated[int, u32("samples in the whole gradient")] = 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """One frame's worth of a gradient in stripes, to its aggregator; `PAYLOAD_BYTES` of lanes follow.

    It explains itself: it may arrive before the aggregator's agent knows that the list is closed.
    """

    members: Annotated[int, u64("the closed list; bit k - 1 is member k")]
    index: Annotated[int, u32("place in the vector, from 0")]
    fragments: Annotated[int, u32("fragments in the vector")]
    number: Annotated[int, u32("ask: its number; to a switch: view of the round `behind`; else 0")]
    width: Annotated[int, u8("bits of a lane: 32, 16, 8")]
    exponent: Annotated[int, i8("of the lanes: value = lane * 2**exponent; 127: not finite")]
    unit: Annotated[int, i8("log2 of what all sums of the round are multiples of")]
    behind: Annotated[
        int, u8("to a switch: it adds the remainder of so many rounds before; 0: of none")
    ] = 0


@dataclass(frozen=True, slots=True)
class Sum(Contribution):
    """The sum of the list's contributions, as wide as one of them. The lanes follow."""


@dataclass(frozen=True, slots=True)
class Ask(Contribution):
    """A member asks for a sum; `number` is the question's. As long as the answer, which is written over it."""


@dataclass(frozen=True, slots=True)
class Lacking(Contribution):
    """The answer where a sum is not made yet; `members` have not contributed. `PAYLOAD_BYTES` of no meaning follow."""


@dataclass(frozen=True, slots=True)
class Push:
    """A part of a worker's step, to the server that holds these parameters; `PAYLOAD_BYTES` of lanes follow.

    The four frames of servers have one body (docs/servers.md). `index`, `fragments`, `width` and `exponent` lie where a
    `Contribution` has them.
    """

    version: Annotated[
        int,
        u32(
            "push: the least of what was pulled there before; answers: the server's, before the lanes"
        ),
    ]
    number: Annotated[int, u32("of this worker's step, or of its pull; repeated in the answer")]
    index: Annotated[
        int, u32("place in the vector, from 0; pull, held: in fragments of 32-bit lanes")
    ]
    fragments: Annotated[int, u32("of these in the vector")]
    staleness: Annotated[int, u32("answers to a push: what was fixed for it; else 0")]
    width: Annotated[int, u8("bits of a lane: 32, 16, 8; pull, held: 32")]
    exponent: Annotated[int, i8("of the lanes: value = lane * 2**exponent")]
    reason: Annotated[int, u8("taken: 0, or why it is not done; else 0")] = 0
    reserved: Annotated[int, u8("0")] = 0


@dataclass(frozen=True, slots=True)
class Pull(Push):
    """A worker lacks these parameters. As long as the answer, which is written over it."""


@dataclass(frozen=True, slots=True)
class Held(Push):
    """The answer to a pull, and to a push of 32-bit lanes: `PAYLOAD_BYTES` of parameters follow, 32 bits each."""


@dataclass(frozen=True, slots=True)
class Taken(Push):
    """The answer to a push of narrower lanes, to a repeated one, and to a contribution; or why not. Nothing follows."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A part of a member's numbers in a direct call (docs/direct.md); `SHORT_BYTES` or `PAYLOAD_BYTES` of them follow.

    The header's `round` is the open round of the channel.
    """

    call: Annotated[int, u32("checksum of what is called; the same at all members")]
    number: Annotated[int, u32("direct calls on the channel since the last round, before this one")]
    size: Annotated[int, u16("bytes of this member's numbers")]
    index: Annotated[int, u8("place among the fragments, from 0")]
    fragments: Annotated[int, u8("fragments of this member's numbers")]
    view: Annotated[int, u32("the call's view; in an answer to SETTLE, an earlier one")]


@dataclass(frozen=True, slots=True)
class Marked(Numbers):
    """Its sender has the numbers of all members in that call. Nothing follows."""


@dataclass(frozen=True, slots=True)
class Withdrawn(Numbers):
    """Its sender goes on without that call, and never marks it. Nothing follows."""


@dataclass(frozen=True, slots=True)
class Settle(Numbers):
    """The view has changed before its sender had the marks of all: has this member marked it? Nothing follows."""


@dataclass(slots=True)
class Token:
    """The right to broadcast (R9, R10), and the state of the open round."""

    generation: Annotated[int, u32("raised by whoever creates a token")]
    hop: Annotated[int, u32("raised by every hand-on")]
    owner: Annotated[int, u16("number of the member that may take it")]
    state: Annotated[int, u8("0 open, 1 closing")]
    members: Annotated[int, u8("entries that follow")]
    idle: Annotated[int, u16("hops since anything changed")]
    ranges: Annotated[int, u16("missing ranges after the entries")]
    sent: Annotated[int, u32("distinct fragments sent in the open round")]
    unit: Annotated[int, i8("log2 of the accumulators' unit, open round")]
    unit_before: Annotated[int, i8("the same, of the round committed last")]
    stripe: Annotated[int, u16("0; room for several tokens")] = 0
    listed: Annotated[int, u64("closing: whose gradients are in; bit k - 1 is member k")] = 0
    settled: Annotated[int, u32("where a switch adds: sums from the first on that all have")] = 0
    reserved: Annotated[int, u32("0")] = 0


@dataclass(slots=True)
class Entry:
    """One member's line in the token; the k-th is that of member k."""

    samples_before: Annotated[int, u32("samples counted in the round committed last")] = 0
    samples: Annotated[int, u32("samples counted in the open round")] = 0
    ready: Annotated[
        int,
        u32("samples worked so far, not yet sent; where a switch adds a closed list: sums here"),
    ] = 0
    digest: Annotated[int, u32("of weights, buffers and optimizer after round `read`; 0: none")] = 0
    read: Annotated[int, u16("last round read out and applied, its low 16 bits")] = 0
    marks: Annotated[int, u8("mark mask")] = 0
    unit: Annotated[int, i8("log2 of the unit wanted for the next round")] = -128


@dataclass(frozen=True, slots=True)
class Range:
    """Fragments that some member lacks; only their sender repairs. Of sums that a switch adds, all send again."""

    first: Annotated[int, u32("first missing fragment")]
    count: Annotated[int, u16("how many in a row")]
    sender: Annotated[int, u16("member that sent them; of sums, the member that lacks them")]


@dataclass(frozen=True, slots=True)
class Call:
    """R1: the starter asks who takes part; the tail is its name. R20: the lead calls standby hosts; it is the job's."""

    nonce: Annotated[
        int, u64("names this formation; 0: the job admits nobody, and no answer is wanted")
    ]
    view: Annotated[int, u32("in force at the caller; 0 if it starts a network")] = 0
    ballot: Annotated[
        int,
        u32("under which that view was installed; in no view: the group that forms, 0 for a job"),
    ] = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """R2, R20: a host takes part. The tail is its name."""

    nonce: Annotated[int, u64("of the call")]
    fresh: Annotated[int, u64("random: the list that takes this host in must name it")] = 0
    view: Annotated[int, u32("highest view this host has been in")] = 0
    stage: Annotated[
        int,
        u8(
            "0 nothing of the job, 1 its files, 2 a training program that waits, 3 only asks, 4 a program that waits"
            " for a group"
        ),
    ] = 0
    reserved: Annotated[int, u8("0")] = 0
    group: Annotated[int, u16("with stage 4: which group, a hash of its name and size")] = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Node 1 opens the next phase. The tail is its settings as JSON. In force once all have acknowledged."""

    number: Annotated[int, u32("1, 2, ... in a view")]
    generation: Annotated[int, u32("of the token that the phase starts with")]
    phase: Annotated[int, u8("1 hand-out, 2 train, 3 test, 4 finish, 5 stop")]
    reserved: Annotated[int, u8("0")] = 0
    reserved2: Annotated[int, u16("0")] = 0
    reserved3: Annotated[int, u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """A member has heard a decision; once it is prepared, the tail may hold an answer as JSON."""

    number: Annotated[int, u32("of the decision")]
    prepared: Annotated[int, u8("1: prepared; 0: heard, still preparing")]
    reserved: Annotated[int, u8("0")] = 0
    reserved2: Annotated[int, u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Want:
    """A member without the token tells what it has; with TOKEN_WANTED the holder of a parked one hands it over."""

    ready: Annotated[int, u32("samples worked so far in the round")]
    read: Annotated[int, u32("last round read out and applied")]
    digest: Annotated[int, u32("of the state after that round; 0: none")] = 0
    unit: Annotated[int, i8("with OFFERED: log2 of the step of its coarsest fragment")] = 0
    window: Annotated[int, u8("with OFFERED: fragments to an aggregator at a time; 0: any")] = 0
    lacks: Annotated[int, u16("entries that follow: what is sent again and does not come")] = 0


@dataclass(frozen=True, slots=True)
class Lack:
    """A member's fragments of the open round that the sender of a WANT lacks, and does not get."""

    count: Annotated[int, u32("fragments of that member that are lacking")]
    member: Annotated[int, u16("member that sends them")]
    reserved: Annotated[int, u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """A member cannot go on, nor can the job anywhere; the tail says why, in one line. Or its user cancels the job."""

    cancels: Annotated[
        int, u8("1: the user cancels the job, which is saved first; 0 otherwise")
    ] = 0
    reserved: Annotated[int, u8("0")] = 0
    reserved2: Annotated[int, u16("0")] = 0
    reserved3: Annotated[int, u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """R17: this member departs; the others go on. The tail says why, in one line."""

    reserved: Annotated[int, u64("0")] = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """A host measures the LAN, in no view; the tail of a train's frame is as long as a fragment's payload."""

    nonce: Annotated[int, u64("names the train")]
    number: Annotated[int, u32("of the question, or in the train")]
    step: Annotated[int, u8("1 ask, 2 one frame of the train")]
    reserved: Annotated[int, u8("0")] = 0
    reserved2: Annotated[int, u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """The answer to a question: what has come of that train. The tail is the host's name."""

    nonce: Annotated[int, u64("of the train")]
    first_ns: Annotated[int, u64("when its first frame came, by this host's own clock")]
    last_ns: Annotated[int, u64("the same of its last")]
    count: Annotated[int, u32("frames of it that came")]
    number: Annotated[int, u32("of the question")]
    busy: Annotated[int, u8("1: a job is under way here, or a measurement of its own")] = 0
    reserved: Annotated[int, u8("0")] = 0
    reserved2: Annotated[int, u16("0")] = 0
    tagged: Annotated[int, u32("frames of it that came with an 802.1p tag")] = 0


@dataclass(frozen=True, slots=True)
class Script:
    """Pieces of streams: in no view what scripts print (docs/run.md), in a view a group's store (docs/collective.md).

    In no view OUTPUT and END go to the host that has started the run, SEEN and KILL to the host of that rank. The tail
    of OUTPUT is the piece, and that of END is JSON.
    """

    run: Annotated[int, u64("random, of this run; or of this group and view")]
    at: Annotated[
        int,
        u64(
            "bytes of the stream before the piece; END: all; SEEN: all that came, and 1 for the END"
        ),
    ]
    step: Annotated[int, u8("what it is for")]
    rank: Annotated[int, u8("of the host whose script it is; the number of the stream's member")]
    waits: Annotated[int, u16("OUTPUT: 1 while the script waits for its group to form")] = 0
    stream: Annotated[int, u8("OUTPUT: where the script has printed the piece")] = 0
    reserved: Annotated[int, u8("0")] = 0
    reserved2: Annotated[int, u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Switch:
    """Between a Linux switch that adds (sender 0) and the members that believe it (docs/linux-switch.md).

    HELLO, of the switch, asks for the view. GRANT, of a member, has a `Grant` in its tail, sealed where there is a key.
    READY, of the switch, says whose grants it has. HELLO and READY are tagged with the switch's key, if it has one.
    """

    boot: Annotated[int, u64("random, of this start of the switch")]
    nonce: Annotated[int, u64("hello: a fresh one; grant: that of the hello")]
    members: Annotated[int, u64("ready: whose grants of this view are here; bit k - 1 is member k")]
    number: Annotated[int, u32("grant, ready: of the view")]
    fragments: Annotated[
        int, u32("grant: of the vectors to come, 0: unknown; ready: room for such")
    ]
    width: Annotated[int, u8("bits of a lane of these")]
    step: Annotated[int, u8("1 hello, 2 grant, 3 ready")]
    reserved: Annotated[int, u16("0")] = 0
    reserved2: Annotated[int, u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What a switch must know to add in a view; the live members follow, in order of their numbers."""

    seed: Annotated[bytes, byte_string(16, "that the view was agreed on with: it names the list")]
    siphash: Annotated[bytes, byte_string(16, "key of tokens and fragments; zeros without one")]
    name: Annotated[bytes, byte_string(NAME_BYTES, "of the host that grants, UTF-8, zero padded")]
    lead: Annotated[int, u16("acts as node 1 (R22)")]


@dataclass(frozen=True, slots=True)
class GrantMember:
    """A live member."""

    mac: Annotated[bytes, byte_string(6, "MAC address")]
    number: Annotated[int, u16("from 1")]


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
    | Switch
    | Script
    | Push
    | Pull
    | Held
    | Taken
    | Numbers
    | Marked
    | Withdrawn
    | Settle
)
Item: TypeAlias = Entry | Range | Lack | ViewValue | ViewMember | ViewChannel | Standing

#: Type -> body, then the repeated items with the body's field that counts them.
FORMATS: dict[FrameType, tuple[type[Body], tuple[tuple[type[Item], str], ...]]] = {
    FrameType.CALL: (Call, ()),
    FrameType.ANSWER: (Answer, ()),
    FrameType.VIEW: (
        View,
        ((ViewValue, "values"), (ViewMember, "members"), (ViewChannel, "channels")),
    ),
    FrameType.DECISION: (Decision, ()),
    FrameType.ACK: (Ack, ()),
    FrameType.TOKEN: (Token, ((Entry, "members"), (Range, "ranges"))),
    FrameType.FRAGMENT: (Fragment, ()),
    FrameType.WANT: (Want, ((Lack, "lacks"),)),
    FrameType.FAIL: (Fail, ()),
    FrameType.VOTE: (
        Vote,
        (
            (ViewValue, "values"),
            (ViewMember, "members"),
            (ViewChannel, "channels"),
            (Standing, "standings"),
        ),
    ),
    FrameType.LEAVE: (Leave, ()),
    FrameType.PROBE: (Probe, ()),
    FrameType.ECHO: (Echo, ()),
    FrameType.CONTRIBUTION: (Contribution, ()),
    FrameType.SUM: (Sum, ()),
    FrameType.ASK: (Ask, ()),
    FrameType.LACKING: (Lacking, ()),
    FrameType.SWITCH: (Switch, ()),
    FrameType.SCRIPT: (Script, ()),
    FrameType.PUSH: (Push, ()),
    FrameType.PULL: (Pull, ()),
    FrameType.HELD: (Held, ()),
    FrameType.TAKEN: (Taken, ()),
    FrameType.NUMBERS: (Numbers, ()),
    FrameType.MARKED: (Marked, ()),
    FrameType.WITHDRAWN: (Withdrawn, ()),
    FrameType.SETTLE: (Settle, ()),
}
