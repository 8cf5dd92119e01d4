# SPDX-License-Identifier: Apache-2.0
"""Limits of the wire, and the values that fields of frames take."""

from __future__ import annotations

from enum import IntEnum

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

#: Where a switch adds: fragments by which a member may be ahead of its sums. The switch has room for twice as many.
QUANTUM = 256
SWITCH = bytes.fromhex("026e69637073")  # its MAC address, of the sums that it sends

#: In a phase of sized rounds the low bits of an offer's `samples` are its fragments, the next two the width of its
#: lanes, and the others name the call.
SIZE_BITS = 13
#: Fragments of a sized round at most.
MOST_SIZED = (1 << SIZE_BITS) - 1
_WIDTH_BITS = 2
_WIDTHS = (32, 16, 8, 0)
_CALL_BITS = 31 - SIZE_BITS - _WIDTH_BITS

#: Of a direct call (docs/direct.md): members at most, fragments of each at most, and the bytes of a short fragment.
DIRECT_MEMBERS = 16
DIRECT_FRAGMENTS = 4
SHORT_BYTES = 64

#: Channels of a phase at most, and rounds of one of its steps, over all channels (docs/channels.md).
MAX_CHANNELS = 8
MOST_ROUNDS = 32
#: The number of a frame's channel in the header's `flags`: their three highest bits.
CHANNEL_SHIFT = 13
CHANNEL_MASK = (MAX_CHANNELS - 1) << CHANNEL_SHIFT

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


def sized_samples(fragments: int, call: int, width: int = 32) -> int:
    """The `samples` of an offer to a sized round: above 0, below 2**31.

    Args:
        fragments: of the contribution, 1 to `MOST_SIZED`.
        call: a checksum of what is called. So many of its bits travel as there is room for.
        width: of its lanes: 8, 16 or 32 bits.
    """
    what = (call & (1 << _CALL_BITS) - 1) << _WIDTH_BITS | _WIDTHS.index(width)
    return what << SIZE_BITS | fragments


def size_of(samples: int) -> int:
    """The fragments that an offer to a sized round has."""
    return samples & MOST_SIZED


def width_of(samples: int) -> int:
    """Bits of the lanes that an offer to a sized round has; 0: no host of this version offers that."""
    return _WIDTHS[samples >> SIZE_BITS & (1 << _WIDTH_BITS) - 1]


def channel_flags(channel: int) -> int:
    """The bits of the header's `flags` that name that channel; 0 of channel 0."""
    return channel << CHANNEL_SHIFT


def channel_of(flags: int) -> int:
    """The channel that the header's `flags` name."""
    return (flags & CHANNEL_MASK) >> CHANNEL_SHIFT


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
    SWITCH = 18  # a Linux switch that adds, and the members that believe it
    SCRIPT = 19  # what a host's script prints, to the host that started it; the store of a group
    PUSH = 20  # with servers: a part of a worker's step, to the server that adds it
    PULL = 21  # with servers: a worker lacks these parameters; to a server, or to its partner
    HELD = 22  # with servers: the answer, these parameters
    TAKEN = 23  # with servers: a part of a step is added, or why something is not done
    NUMBERS = 24  # of a direct call: a part of a member's numbers, to all
    MARKED = 25  # of a direct call: its sender has the numbers of all
    WITHDRAWN = 26  # of a direct call: its sender never marks it
    SETTLE = 27  # of a direct call of an earlier view: has the member marked it, or will it never?


#: Types whose frames belong to a channel. Of other types the bits of the channel are 0, and nobody reads them.
CHANNELLED = frozenset(
    {FrameType.WANT, FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK, FrameType.LACKING}
    | {FrameType.PUSH, FrameType.PULL, FrameType.HELD, FrameType.TAKEN}
    | {FrameType.NUMBERS, FrameType.MARKED, FrameType.WITHDRAWN, FrameType.SETTLE}
)


# Combined, flags and marks are plain numbers: an `IntFlag` is slow to test, and every frame is tested.
class Flag(IntEnum):
    """The header's `flags`. Their three highest bits are the number of the frame's channel (`CHANNEL_MASK`)."""

    REPEAT = 1  # R16: sent before; WANT: an answer, which needs none
    BOUNCED = 2  # handed on by the kernel
    PARKED = 4  # the owner keeps the token: nothing to do
    REPAIR = 8  # a fragment sent again on request
    TOKEN_WANTED = 16  # WANT: hand me the token
    ADD = 32  # a fragment that the switch is to add; of sender 0, the sum
    ANSWER = 64  # made by the XDP program out of a frame that came: it has numbers of its own
    COMPLETE = 128  # WANT: this member has all that the round's closed list comes to; NUMBERS: those of all
    OFFERED = 256  # WANT: this member contributes `ready` samples, in steps up to `unit`
    SAVES = 512  # with COMPLETE: as the mark SAVES; with a stop, as that of the round before
    GOES_ON = 1024  # WANT: as the mark GOES_ON


class TokenState(IntEnum):
    """The token's `state`: gradients may still come, or the list is closed."""

    OPEN = 0
    CLOSING = 1


class Mark(IntEnum):
    """A member's `marks` in the token, about the open round."""

    CONTRIBUTED = 1
    COMPLETE = 2  # has every fragment of the list
    SKIPPED = 4  # had a gradient that does not fit the unit: asks for a larger one
    SAVES = 8  # R22: the lead's: it writes a checkpoint of the state after this round
    SAVED = 16  # the same, of the round committed last
    GOES_ON = 32  # with servers: it knows that all workers have read the round before, and may push


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
    GROUP = 4  # it is in no job; a program waits for the group that the answer names


class ProbeStep(IntEnum):
    """Of a PROBE frame."""

    ASK = 1  # count the train of this nonce from now on, and say what was counted so far
    TRAIN = 2  # one of many, as long as a fragment: counted in the kernel, and dropped


class ScriptStep(IntEnum):
    """Of a SCRIPT frame."""

    OUTPUT = 1  # a piece of what the script has printed; an empty one is a sign of life; or of a store's stream
    END = 2  # the script has ended; the tail says how, as JSON
    SEEN = 3  # the host that started it has all up to there; of the sequencer's stream by itself: all members do
    KILL = 4  # end the script


class ScriptStream(IntEnum):
    """Where a script has printed a piece of its output."""

    STDOUT = 0  # its standard output
    STDERR = 1  # its standard error


class Refusal(IntEnum):
    """Of a TAKEN frame: why what was asked is not done."""

    NONE = 0  # it is done, now or before
    SYNCHRONISING = 1  # the round's synchronisation has begun there: ask after its commit
    NOT_YET = 2  # of a round that is not open there yet
    ABSENT = 3  # a partner does not have these parameters of this round
    FULL = 4  # a parameter there has come near the limits of its numbers


class SwitchStep(IntEnum):
    """Of a SWITCH frame."""

    HELLO = 1  # the switch asks which view is in force
    GRANT = 2  # a member says so, and gives it the view's key
    READY = 3  # the switch adds for these members
