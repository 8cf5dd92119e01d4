/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The definitions that the XDP programs share with the agent, and with the
 * control process of a Linux switch: the maps' contents and the counted
 * reasons. Read by ebpf/nicps.c and ebpf/nicps_switch.c, and by
 * nicps/layout.py. It takes its NumPy records, names and limits from the text
 * of this file, so only unsigned numbers, byte arrays and plain #defines may be
 * here.
 */
#ifndef NICPS_SHARED_H
#define NICPS_SHARED_H

#include <linux/types.h>

#define NICPS_BANKS 2 /* a round's bank is its parity */
#define NICPS_SENDERS 65 /* member numbers from 1; 0 is a switch that adds */
#define NICPS_CHANNELS 8 /* of stripes: most of a phase (docs/channels.md) */
#define NICPS_COUNTS 72 /* in a bank: by sender, then by channel above 0 */
#define NICPS_BLOCK_BYTES 11520 /* 1440 accumulators of 64 bits */
#define NICPS_BLOCK_SLOTS 8 /* most fragments in a block: raw bytes */
#define NICPS_SAVED_BYTES 1536 /* room for any frame */
#define NICPS_LANE_BYTES 1440 /* lanes of a fragment, as on the wire */

#define NICPS_TAIL_PARTS \
	16 /* for a round's last sums the agent is told so many times as often */
#define NICPS_TAIL_CLOCK 4 /* but not after fewer sums than this */

#define NICPS_PRIORITY_CONTROL 7 /* of tokens and control frames, in 802.1p tags */

#define NICPS_ROOM_EXCHANGE 0 /* places in nicps_rooms */
#define NICPS_ROOM_DIRECT 1

#define NICPS_DESK_MEMBERS 16 /* numbers of members in direct calls, from 1 */
#define NICPS_DESK_FRAGMENTS 4 /* of each of them */
#define NICPS_MARKED 1 /* verdict: this host has the numbers of all, and has said so */
#define NICPS_WITHDRAWN 2 /* verdict: this host goes on without the call */

#define NICPS_WORKERS 64 /* members that may push to a server */
#define NICPS_PARAMETER_BITS 40 /* servers hold multiples of 2**-40 */

#define NICPS_COUNTING 0x100000000 /* in a count: a processor is about to count */
#define NICPS_OPENING 0x8000000000000000 /* in a count: a processor opens a tag */

#define NICPS_MARK 0x6e696370 /* of the agent's sockets: their frames are signed */
#define NICPS_DIRECT_RATE \
	100000 /* frames of direct calls a second that a program may send */
#define NICPS_REPLAY_WINDOW 1024 /* frames of one sender that may overtake each other */
#define NICPS_LAST_HOP 0xffffffff /* of a generation, which then must rise */
#define NICPS_LAST_SEQUENCE 0xffffffff /* of a view, which then needs a new one */

/*
 * Control frames a second that go up, and as many at once: of the members of
 * the view and a switch, each with an equal share, and of all others together.
 */
#define NICPS_MEMBERS_RATE 12000
#define NICPS_OTHERS_RATE 1000
#define NICPS_OTHERS \
	65 /* place in nicps_limits; members and the switch have their numbers */
#define NICPS_PROGRAM 66 /* the same of the training program */
#define NICPS_SECOND_NS 1000000000

#define NICPS_PLACES 2 /* of a fragment at a switch: for a round, and for one before */
#define NICPS_PORTS 64 /* of a switch */
#define NICPS_TOLD_RATE 10 /* messages of each kind a second from a switch's program */
#define NICPS_TOLD_ROOM 0 /* kinds: a vector is too long */
#define NICPS_TOLD_VIEW 1 /* frames of a view that is not in force */
#define NICPS_TOLD_OTHER 2 /* contributions that differ in the fields about their sum */
#define NICPS_TOLD_KINDS 3

/* Written by the agent, through the mapped memory. */
struct nicps_config {
	__u64 live_members; /* bit number - 1 */
	__u64 alive_until_ns; /* CLOCK_MONOTONIC: bounce no token after that */
	__u64 passes; /* bit number - 1: members besides the servers whose parameters are taken */
	__u64 position; /* of the newest token that the agent has sent: older ones are stale */
	__u32 enabled; /* take tokens and fragments */
	__u32 network;
	__u32 view;
	__u32 round_low; /* first and last round whose fragments are taken */
	__u32 round_high;
	__u32 number; /* mine, from 1 */
	__u32 members; /* numbers given out: entries of a token */
	__u32 live; /* members that are in the view */
	__u32 next; /* the member that gets the token next */
	__u32 bounce; /* the token needs nothing from the agent */
	__u32 round; /* the open one */
	__u32 sent_seen; /* the token's `sent`, as the agent knows it */
	__u32 own_sent; /* fragments that this host sent in the open round */
	__u32 blocks; /* accumulator blocks in a bank */
	__u32 keyed; /* tokens and fragments are signed, with the key of the view */
	__u32 rank; /* mine among the aggregators of stripes, from 1, in the open round; 0: none */
	__u32 rank_next; /* the same for the rounds after it */
	__u32 aggregators; /* their number in the open round; 0: it is not striped */
	__u32 aggregators_next; /* the same for the rounds after it */
	__u32 channels; /* of the phase; frames of others are not taken */
	__u32 width; /* bits of a lane in the open round, with servers */
	__u32 room; /* fragments in a bank of sums, and of own lanes, of all channels */
	__u32 gather_blocks; /* accumulator blocks of my stripes in a bank, of all channels */
	__u32 clock; /* the agent is woken after so many sums, sooner near the end; 0: only by the last */
	__u32 sums; /* fragments of the open round are sums that a switch has added */
	__u32 sums_next; /* the same for the rounds after it */
	__u32 settled; /* the last round of servers that was committed with a list */
	__u32 staleness; /* a push counts 1 / staleness; otherwise all count alike */
	__u32 tags; /* frames go out with an 802.1p tag */
	__u32 iface; /* index of the interface */
	__u32 rest_view[2]; /* by parity: of the round whose remainders a switch adds */
	__u8 rest_behind[2]; /* by parity: how many rounds before it is; 0: none */
	__u8 seal[6]; /* destination of frames that go up: the agent takes no others */
	__u8 everybody[6]; /* destination of frames to all hosts */
};

/*
 * The rounds of a channel of stripes, and its area in each bank of the maps.
 * Written by the agent, through the mapped memory. The words of the same names
 * in struct nicps_config are those of tokens, of fragments that are broadcast,
 * and of servers.
 */
struct nicps_channel {
	__u32 round_low; /* first and last round whose frames are taken */
	__u32 round_high;
	__u32 round; /* the open one */
	__u32 first; /* of its fragments, among own lanes and sums */
	__u32 room; /* their number */
	__u32 first_block; /* of its blocks, among the places of my stripes */
	__u32 blocks; /* their number */
	__u32 width; /* bits of a lane in the open round */
	__u32 width_next; /* the same for the rounds after it */
	__u32 offered[2]; /* by parity: conversion of my lanes that counts; 0: none */
	__u32 clock; /* as in struct nicps_config */
	__u32 priority; /* of its frames, in 802.1p tags */
	__u32 direct; /* frames of direct calls are taken */
	__u32 queue; /* of these: the class of the host's queue (SO_PRIORITY) */
	__u32 reserved; /* records of maps are multiples of eight bytes */
};

/*
 * A direct call on a channel, one for each parity of the calls since the last
 * round (docs/direct.md). Everything in it changes under the claim.
 */
struct nicps_desk {
	__u64 claim;
	__u64 tag; /* open round of the channel << 32 | direct calls since the last one */
	__u64 here; /* bit number - 1: the members all of whose numbers are here */
	__u64 marks; /* the members that have marked, this one too */
	__u64 gone; /* the members that have withdrawn */
	__u64 agreed; /* the members that have said in a later view that they have marked */
	__u32 view; /* the call's */
	__u32 agreed_view; /* that later view */
	__u32 own; /* this member's numbers have all been sent */
	__u32 verdict;
	__u32 repeated_view; /* of what follows: frames are numbered anew in each view */
	__u32 reserved; /* records of maps are multiples of eight bytes */
	/* Frames that were answered, by member and by the way on which they left; of all calls. */
	__u64 repeated[2 * NICPS_DESK_MEMBERS];
	__u32 call[NICPS_DESK_MEMBERS]; /* checksums */
	__u32 size[NICPS_DESK_MEMBERS]; /* bytes of their numbers */
	__u8 parts[NICPS_DESK_MEMBERS]; /* fragments of their numbers */
	__u8 have[NICPS_DESK_MEMBERS]; /* bits of those that are here */
};

/* A fragment of a member's numbers. */
struct nicps_numbers_of {
	__u8 byte[NICPS_LANE_BYTES];
};

/*
 * What this member sends next to an aggregator, as round << 32 | index of the
 * fragment in that stripe. The agent makes the window smaller by `swallow`: so
 * many sums of the stripe send no contribution.
 */
struct nicps_sent {
	__u64 next;
	__u64 swallow;
};

/* SipHash's key, two words in the processor's byte order; only the agent may read it. */
struct nicps_key {
	__u64 word[2];
};

/*
 * The last numbers that this host gave to tokens and fragments in the view: to
 * frames through the interface's queue and to bounced tokens, and to other
 * answers of the XDP program, which overtake the queue.
 */
struct nicps_outgoing {
	__u64 sequence;
	__u64 answers;
};

/*
 * Numbers of a sender's frames in a channel, tokens excepted: the highest, and
 * that of its program's answers; and its questions that were answered, the
 * newest number and, below it, a bit for each of the 32 before. Its pulls, by
 * the way on which they left, have the numbers of their frames.
 */
struct nicps_window {
	__u64 highest;
	__u64 answers;
	__u64 asked;
	__u64 pulled[2];
};

/*
 * The highest number of a sender's tokens, and that of a repeated one. Tokens
 * leave before contributions that were numbered earlier, and must not close
 * their window.
 */
struct nicps_token_window {
	__u64 highest;
	__u64 repeat;
};

/*
 * R4: the members' MAC addresses, by number; zero for a member that is
 * not in the view (R19). 0 is a switch that adds.
 */
struct nicps_member {
	__u8 mac[6];
	__u8 rank[2]; /* among the aggregators, open round and later ones; 0: none */
};

/* When the next control frame would come at the full rate; a second ahead: too many. */
struct nicps_limit {
	__u64 due_ns;
};

/* Frames of the train that the agent waits for (`nicps doctor --network`). */
struct nicps_train {
	__u64 nonce;
	__u64 count;
	__u64 first_ns; /* CLOCK_MONOTONIC */
	__u64 last_ns;
	__u64 tagged; /* that came with an 802.1p tag */
};

/* The token, as this host has seen it; a position is generation << 32 | hop. */
struct nicps_ring {
	__u64 seen; /* highest position that the kernel accepted or forwarded */
	__u64 heard_ns; /* CLOCK_MONOTONIC (coarse) of the last frame of a member, token or fragment */
	__u64 token_ns; /* the same of the last token */
	__u64 bounced; /* position that the kernel forwarded last */
	__u64 bounces;
	/* By channel and parity: tag of the round of stripes that began last. */
	__u64 announced[NICPS_BANKS * NICPS_CHANNELS];
	__u64 version; /* of a server: round << 32 | pushes that are whole */
	__u64 full; /* of a server: 1 and the index of a push fragment that takes no more steps */
	__u64 refused_ns; /* CLOCK_MONOTONIC (coarse): the agent was last told of a refusal */
};

/* R16: the last token that the kernel forwarded, to be repeated by the agent. */
struct nicps_saved {
	__u64 version; /* odd while the kernel writes */
	__u64 length;
	__u8 frame[NICPS_SAVED_BYTES]; /* from the version byte on */
};

/*
 * Distinct fragments taken, by bank and sender; sender 0: a switch's sums, or
 * those of channel 0. Behind the senders are the sums of other channels. The
 * tag is view << 32 | round: it only grows. The low 32 bits of `count` are
 * their number; above them is the number of processors that are about to count
 * one under this tag, and at the top a bit that is set while a processor opens
 * a new tag.
 */
struct nicps_progress {
	__u64 tag;
	__u64 count;
};

/* One fragment's place in a bank, and the members that have been added into it. */
struct nicps_slot {
	__u64 claim;
	__u64 tag;
	__u64 seen; /* bit sender - 1; all of them: a sum */
};

/* Sums of a fragment of 8-bit lanes, two of 16, four of 32, or eight of bytes. */
struct nicps_block {
	__u64 lane[NICPS_BLOCK_BYTES / 8];
};

/*
 * A fragment's place in its aggregator's stripe, and the members whose parts
 * are in it. The fields of the first part hold for the whole round.
 */
struct nicps_gather {
	__u64 claim;
	__u64 tag;
	__u64 seen; /* bit sender - 1 */
	__u64 members; /* the list */
	__u32 index;
	__u32 fragments;
	__u8 unit;
	__u8 width;
	__u8 not_finite;
	__u8 own; /* exponent of the aggregator's lanes, as it was checked */
	__u8 last; /* with this part the list is whole */
	__u8 reserved[3];
};

/*
 * A sum, as received or made here; or parameters, as received. `tag` of these
 * is the number of the pull or of the step that they answer.
 */
struct nicps_stored {
	__u64 claim;
	__u64 tag;
	__u64 rest; /* tag of the sum that was made here, whose remainders there are; 0: none.
		     * Of parameters round << 32 | version. */
	__u8 exponent;
	__u8 reserved[7];
	__u8 lane[NICPS_LANE_BYTES];
};

/* This member's lanes of a fragment, written by its training program. */
struct nicps_own {
	__u32 conversion; /* written last */
	__u8 exponent;
	__u8 reserved[3];
	__u8 lane[NICPS_LANE_BYTES];
};

/* A server's place for a push fragment, and the steps that have been added to its parameters. */
struct nicps_home {
	__u64 claim;
	__u64 tag; /* view << 32 | round of the accumulators */
	__u64 seen; /* members whose contributions are in them; bit sender - 1 */
	__u64 members; /* the list; all of it seen: the average is made */
	__u32 due; /* the average is made, and not in the parameters yet */
	__u32 full; /* a parameter has come near the limits */
	__u32 last[NICPS_WORKERS]; /* the newest step of each worker that was added */
};

/* A worker's push at this server, as its first fragment has fixed it. */
struct nicps_pusher {
	__u64 claim;
	__u64 number; /* of the step */
	__u32 weight;
	__u32 staleness;
};

/* The acknowledgements of a server for this worker's steps. */
struct nicps_answered {
	__u64 staleness; /* number of the newest step << 32 | its staleness */
	__u64 version; /* round << 32 | the highest version */
};

/*
 * The messages that wake the agent: the number of sums of a round that are
 * here. In a round of stripes or servers also the list, as the first part that
 * came here has it (`count` is 0). With servers also the number of fragments of
 * a step that are acknowledged, or of a pull that are here (`tag` is its
 * number), that a question was refused (`fragments` is 0, `unit` the member that
 * refuses), and that a parameter is near the limits (`members` and `count` are
 * 0). Some are lost if the agent sleeps for long: it then reads the maps.
 */
struct nicps_bell {
	__u64 tag;
	__u64 members;
	__u32 count;
	__u32 fragments;
	__u8 unit;
	__u8 channel;
	__u8 reserved[6];
};

/* Of a Linux switch that adds. Written by its control process, through the mapped memory. */
struct nicps_switch_config {
	__u64 live_members; /* bit number - 1 */
	__u32 enabled; /* a view is in force */
	__u32 network;
	__u32 view;
	__u32 keyed; /* contributions, questions and sums are signed, with the key of the view */
	__u32 room; /* fragments of a vector */
	__u32 width; /* bits of a lane */
	__u8 everybody[6]; /* destination of sums */
};

/*
 * One of the two places of a fragment at a switch: the members whose parts are
 * in it, and the fields of the first of them about the round. The claim of the
 * first place holds for both, and for their blocks and lanes.
 */
struct nicps_place {
	__u64 claim;
	__u64 tag;
	__u64 seen; /* bit sender - 1 */
	__u64 members; /* the list; the sum is made when all of it is seen */
	__u32 fragments;
	__u32 number; /* with `behind`: view of the round whose remainder belongs to this one */
	__u8 behind;
	__u8 unit;
	__u8 not_finite;
	__u8 exponent; /* of the sum, once it is made */
	__u8 last; /* with this part the list is whole */
	__u8 reserved[3];
};

/* The sum that was made in a place. */
struct nicps_lanes {
	__u8 lane[NICPS_LANE_BYTES];
};

/*
 * The messages to a switch's control process, and their rates: a kind's `last`
 * is the last value sent (the fragments, the view, the tag).
 */
struct nicps_told {
	__u64 last;
	__u64 due_ns;
};

/* Of two values that differ, the place's comes first, then that of the refused contribution. */
struct nicps_message {
	__u64 tag;
	__u64 members[2];
	__u32 fragments[2];
	__u32 number[2];
	__u32 kind;
	__u32 index;
	__u32 sender;
	__u8 behind[2];
	__u8 unit[2];
	__u8 width;
	__u8 reserved[7];
};

/*
 * Counts of our frames by outcome. Every frame that is not used has a reason
 * here.
 */
enum nicps_count {
	NICPS_COUNT_ADDED, /* fragment added, or stored as its slot's first */
	NICPS_COUNT_BOUNCED, /* token forwarded by the kernel */
	NICPS_COUNT_RAISED, /* token given to the agent */
	NICPS_COUNT_HEARD, /* another member's token, with nothing new in it */
	NICPS_COUNT_CONTROL, /* control frame given to the agent */
	NICPS_COUNT_LIMITED, /* control frame, over the rate */
	NICPS_COUNT_PROBED, /* frame of a train: the LAN is being measured */
	NICPS_COUNT_TRUNCATED, /* shorter than its length field, or than its type */
	NICPS_COUNT_VERSION, /* another version of the format */
	NICPS_COUNT_TYPE, /* unknown type */
	NICPS_COUNT_NETWORK, /* another network on the same LAN */
	NICPS_COUNT_DISABLED, /* token or fragment while this host is in no view */
	NICPS_COUNT_VIEW, /* another view */
	NICPS_COUNT_STRANGER, /* R4: the MAC is not that of the member named */
	NICPS_COUNT_ASTRAY, /* for another member: a switch has flooded it */
	NICPS_COUNT_ECHO, /* this host's own frame, come back */
	NICPS_COUNT_FORGED, /* the tag is not made with this view's key */
	NICPS_COUNT_REPLAYED, /* an old frame sent again */
	NICPS_COUNT_ROUND, /* fragment outside the rounds that are open */
	NICPS_COUNT_MODE, /* a member's fragment where the switch adds, or a sum where it does not */
	NICPS_COUNT_MALFORMED, /* fields that are not valid */
	NICPS_COUNT_SHIFT, /* shift over the limit: the sum could overflow */
	NICPS_COUNT_RANGE, /* fragment outside the accumulators */
	NICPS_COUNT_DUPLICATE, /* fragment that is in the sum already */
	NICPS_COUNT_GATHERED, /* contribution added in my stripe; others are missing */
	NICPS_COUNT_SUMMED, /* the last contribution: the sum was sent */
	NICPS_COUNT_STORED, /* sum stored */
	NICPS_COUNT_CLOCKED, /* own contribution, sent when that sum came */
	NICPS_COUNT_ANSWERED, /* question answered, by a sum or the missing members */
	NICPS_COUNT_UNREADY, /* last contribution, but my own lanes are not ready */
	NICPS_COUNT_BUSY, /* another processor has the slot; repaired later */
	NICPS_COUNT_STALE, /* token not newer than the last one seen */
	NICPS_COUNT_SPENT, /* own frame, not sent: the view's numbers are used up */
	NICPS_COUNT_LEFT_OUT, /* remainder that a switch could not add to a later sum */
	NICPS_COUNT_PUSHED, /* fragment of a step, added to the parameters here */
	NICPS_COUNT_PULLED, /* parameters given to a worker */
	NICPS_COUNT_PASSED_ON, /* parameters that were pulled before, given to another member */
	NICPS_COUNT_ACKNOWLEDGED, /* fragment of an own step that a server has added */
	NICPS_COUNT_REFUSED, /* question that was answered with a reason, or such an answer */
	NICPS_COUNT_FULL, /* fragment of a step for parameters near the limits */
	NICPS_COUNT_DIRECT, /* frame of a direct call, taken */
	NICPS_COUNT_CONFINED, /* frame of a training program that it may not send */
	NICPS_COUNTERS,
};

#endif /* NICPS_SHARED_H */
