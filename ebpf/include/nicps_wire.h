/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The wire of nicps, for C. Generated from nicps/wire by `python -m nicps.wiregen`:
 * change it there. Read by the XDP and TC programs, and by any C program in user space.
 * The EtherType can be set from the compiler's command line.
 */
/* clang-format off */
#ifndef NICPS_WIRE_H
#define NICPS_WIRE_H

#include <linux/types.h>

#ifndef NICPS_ETHERTYPE
#define NICPS_ETHERTYPE 0x88b5 /* IEEE 802 local experimental; settable */
#endif

#define NICPS_VERSION 1                    /* first byte of every frame of ours */
#define NICPS_MAX_MEMBERS 64               /* members of a network */
#define NICPS_PAYLOAD_BYTES 1440           /* payload of a fragment */
#define NICPS_BLOCK_LANES 1440             /* accumulators in a block of the map */
#define NICPS_MAX_FRAME_BYTES 1500         /* longest frame, from version on */
#define NICPS_MAX_CHANNELS 8               /* channels of a phase */
#define NICPS_CHANNEL_MASK 57344           /* bits of `flags`: the channel's number */
#define NICPS_CHANNEL_SHIFT 13             /* the lowest of these bits */
#define NICPS_SHORT_BYTES 64               /* payload of a short fragment there */
#define NICPS_NAME_BYTES 14                /* host name in a member list */
#define NICPS_QUANTUM 256                  /* fragments by which a member may be ahead of its sums, where a switch adds */
#define NICPS_SWITCH 2673237782643         /* MAC address of a switch that adds */
#define NICPS_ETHERNET_BYTES 14            /* Ethernet header, before version */
#define NICPS_HEADER_BYTES 32              /* header */
#define NICPS_FRAGMENT_HEADER_BYTES 48     /* header and fragment */
#define NICPS_CONTRIBUTION_HEADER_BYTES 56 /* header and contribution, or sum, ask, lacking */
#define NICPS_PUSH_HEADER_BYTES 56         /* header and push, pull, held, taken */
#define NICPS_NOT_FINITE 127               /* exponent of lanes that are not finite */
#define NICPS_TOKEN_HEADER_BYTES 72        /* header and token */
#define NICPS_ENTRY_BYTES 20               /* a member's line in the token */
#define NICPS_RANGE_BYTES 8                /* a missing range in the token */
#define NICPS_MAX_SHIFT_0 0                /* shift of raw bytes */
#define NICPS_MAX_SHIFT_8 50               /* largest shift, lanes of 8 bits */
#define NICPS_MAX_SHIFT_16 42              /* largest shift, lanes of 16 bits */
#define NICPS_MAX_SHIFT_32 26              /* largest shift, lanes of 32 bits */

/* The header's `type`. */
enum nicps_type {
	NICPS_TYPE_CALL = 1,          /* R1, R20: who takes part, who comes back? */
	NICPS_TYPE_ANSWER = 2,        /* R2, R20: I do */
	NICPS_TYPE_VIEW = 3,          /* R3, R17, R20: a member list is proposed, or in force */
	NICPS_TYPE_DECISION = 4,      /* R5 to R7, R14: node 1 decides, all acknowledge */
	NICPS_TYPE_ACK = 5,
	NICPS_TYPE_TOKEN = 6,         /* R9, R10 */
	NICPS_TYPE_FRAGMENT = 7,      /* R10, R11 */
	NICPS_TYPE_WANT = 8,          /* a member has become ready while the token is parked */
	NICPS_TYPE_FAIL = 9,          /* a member cannot go on, nor can the job */
	NICPS_TYPE_VOTE = 10,         /* R18: what a member says of a proposed list */
	NICPS_TYPE_LEAVE = 11,        /* R17: a member departs by itself */
	NICPS_TYPE_PROBE = 12,        /* `nicps doctor --network` asks, or sends one frame of a train */
	NICPS_TYPE_ECHO = 13,         /* what a host has counted of a train */
	NICPS_TYPE_CONTRIBUTION = 14, /* in stripes: a member's part of a sum, to the aggregator */
	NICPS_TYPE_SUM = 15,          /* in stripes: the aggregator's, to all, or to who has asked */
	NICPS_TYPE_ASK = 16,          /* in stripes: a member lacks that sum */
	NICPS_TYPE_LACKING = 17,      /* in stripes: it cannot be made yet, and whose part is lacking */
	NICPS_TYPE_SWITCH = 18,       /* a Linux switch that adds, and the members that believe it */
	NICPS_TYPE_SCRIPT = 19,       /* what a host's script prints, to the host that started it; the store of a group */
	NICPS_TYPE_PUSH = 20,         /* with servers: a part of a worker's step, to the server that adds it */
	NICPS_TYPE_PULL = 21,         /* with servers: a worker lacks these parameters; to a server, or to its partner */
	NICPS_TYPE_HELD = 22,         /* with servers: the answer, these parameters */
	NICPS_TYPE_TAKEN = 23,        /* with servers: a part of a step is added, or why something is not done */
	NICPS_TYPE_NUMBERS = 24,      /* of a direct call: a part of a member's numbers, to all */
	NICPS_TYPE_MARKED = 25,       /* of a direct call: its sender has the numbers of all */
	NICPS_TYPE_WITHDRAWN = 26,    /* of a direct call: its sender never marks it */
	NICPS_TYPE_SETTLE = 27,       /* of a direct call of an earlier view: has the member marked it, or will it never? */
};

/* The header's `flags`. Their three highest bits are the number of the frame's channel (`CHANNEL_MASK`). */
enum nicps_flag {
	NICPS_FLAG_REPEAT = 1,        /* R16: sent before; WANT: an answer, which needs none */
	NICPS_FLAG_BOUNCED = 2,       /* handed on by the kernel */
	NICPS_FLAG_PARKED = 4,        /* the owner keeps the token: nothing to do */
	NICPS_FLAG_REPAIR = 8,        /* a fragment sent again on request */
	NICPS_FLAG_TOKEN_WANTED = 16, /* WANT: hand me the token */
	NICPS_FLAG_ADD = 32,          /* a fragment that the switch is to add; of sender 0, the sum */
	NICPS_FLAG_ANSWER = 64,       /* made by the XDP program out of a frame that came: it has numbers of its own */
	NICPS_FLAG_COMPLETE = 128,    /* WANT: this member has all that the round's closed list comes to; NUMBERS: those of all */
	NICPS_FLAG_OFFERED = 256,     /* WANT: this member contributes `ready` samples, in steps up to `unit` */
	NICPS_FLAG_SAVES = 512,       /* with COMPLETE: as the mark SAVES; with a stop, as that of the round before */
	NICPS_FLAG_GOES_ON = 1024,    /* WANT: as the mark GOES_ON */
};

/* The token's `state`: gradients may still come, or the list is closed. */
enum nicps_state {
	NICPS_STATE_OPEN = 0,
	NICPS_STATE_CLOSING = 1,
};

/* A member's `marks` in the token, about the open round. */
enum nicps_mark {
	NICPS_MARK_CONTRIBUTED = 1,
	NICPS_MARK_COMPLETE = 2,    /* has every fragment of the list */
	NICPS_MARK_SKIPPED = 4,     /* had a gradient that does not fit the unit: asks for a larger one */
	NICPS_MARK_SAVES = 8,       /* R22: the lead's: it writes a checkpoint of the state after this round */
	NICPS_MARK_SAVED = 16,      /* the same, of the round committed last */
	NICPS_MARK_GOES_ON = 32,    /* with servers: it knows that all workers have read the round before, and may push */
};

/* What a decision starts: a series of rounds, except FINISH and STOP. */
enum nicps_phase {
	NICPS_PHASE_HANDOUT = 1, /* R5, R6: raw bytes of one member to all */
	NICPS_PHASE_TRAIN = 2,   /* R8 to R13 */
	NICPS_PHASE_TEST = 3,    /* R15: one round of two lanes, succeeded and failed */
	NICPS_PHASE_FINISH = 4,  /* R14: save the model; the acknowledgement tells what there is to collect */
	NICPS_PHASE_STOP = 5,    /* back to standby, after the end or because the job failed */
};

/* Of a VIEW frame, and of the VOTE that answers it. */
enum nicps_step {
	NICPS_STEP_PROPOSE = 1, /* R17: somebody has left; promise to follow */
	NICPS_STEP_ACCEPT = 2,  /* R18: this list, if a majority agrees */
	NICPS_STEP_INSTALL = 3, /* R3, R18: it is in force */
	NICPS_STEP_ASK = 4,     /* R4: a switch's controller asks which one is in force */
};

/* How far a host is that answers a call. */
enum nicps_stage {
	NICPS_STAGE_NOTHING = 0, /* it has nothing of the job */
	NICPS_STAGE_FILES = 1,   /* it has the job's files; its training program starts */
	NICPS_STAGE_WAITING = 2, /* its training program waits for the state */
	NICPS_STAGE_ASKS = 3,    /* it only wants to be told which view is in force */
	NICPS_STAGE_GROUP = 4,   /* it is in no job; a program waits for the group that the answer names */
};

/* Of a PROBE frame. */
enum nicps_probe_step {
	NICPS_PROBE_STEP_ASK = 1,   /* count the train of this nonce from now on, and say what was counted so far */
	NICPS_PROBE_STEP_TRAIN = 2, /* one of many, as long as a fragment: counted in the kernel, and dropped */
};

/* Of a TAKEN frame: why what was asked is not done. */
enum nicps_refusal {
	NICPS_REFUSAL_NONE = 0,          /* it is done, now or before */
	NICPS_REFUSAL_SYNCHRONISING = 1, /* the round's synchronisation has begun there: ask after its commit */
	NICPS_REFUSAL_NOT_YET = 2,       /* of a round that is not open there yet */
	NICPS_REFUSAL_ABSENT = 3,        /* a partner does not have these parameters of this round */
	NICPS_REFUSAL_FULL = 4,          /* a parameter there has come near the limits of its numbers */
};

/* Of a SWITCH frame. */
enum nicps_switch_step {
	NICPS_SWITCH_STEP_HELLO = 1, /* the switch asks which view is in force */
	NICPS_SWITCH_STEP_GRANT = 2, /* a member says so, and gives it the view's key */
	NICPS_SWITCH_STEP_READY = 3, /* the switch adds for these members */
};

/* Of a SCRIPT frame. */
enum nicps_script_step {
	NICPS_SCRIPT_STEP_OUTPUT = 1, /* a piece of what the script has printed; an empty one is a sign of life; or of a store's stream */
	NICPS_SCRIPT_STEP_END = 2,    /* the script has ended; the tail says how, as JSON */
	NICPS_SCRIPT_STEP_SEEN = 3,   /* the host that started it has all up to there; of the sequencer's stream by itself: all members do */
	NICPS_SCRIPT_STEP_KILL = 4,   /* end the script */
};

/* Where a script has printed a piece of its output. */
enum nicps_script_stream {
	NICPS_SCRIPT_STREAM_STDOUT = 0, /* its standard output */
	NICPS_SCRIPT_STREAM_STDERR = 1, /* its standard error */
};

/* Common to all frames of ours; follows the Ethernet header. */
struct nicps_header {
	__u8 version;    /* format version, 1 */
	__u8 type;       /* frame type */
	__be16 flags;    /* flag mask; bits 13 to 15 are the channel's number */
	__be32 network;  /* hash of the network's name */
	__be32 view;     /* number of the member list; 0 before any */
	__be32 round;    /* round that the frame belongs to */
	__be16 sender;   /* member number from 1; 0 if none yet */
	__be16 length;   /* bytes from version on, without padding */
	__be32 sequence; /* sender's frame counter; a repeat has a new one */
	__be64 tag;      /* authentication tag; 0 on a trusted LAN */
};
_Static_assert(sizeof(struct nicps_header) == 32, "struct nicps_header has a hole");

/* One frame's worth of a gradient (or of a hand-out); `PAYLOAD_BYTES` follow, zero padded. */
struct nicps_fragment {
	__be32 index;     /* place in the contribution, from 0 */
	__be32 fragments; /* fragments in the contribution */
	__be16 lanes;     /* lanes in the payload, zeros included; bytes if raw */
	__u8 width;       /* bits of a lane: 32, 16, 8; 0 is raw bytes */
	__u8 shift;       /* left shift of every lane before it is added */
	__be32 samples;   /* samples in the whole gradient */
};
_Static_assert(sizeof(struct nicps_fragment) == 16, "struct nicps_fragment has a hole");

/* The right to broadcast (R9, R10), and the state of the open round. */
struct nicps_token {
	__be32 generation; /* raised by whoever creates a token */
	__be32 hop;        /* raised by every hand-on */
	__be16 owner;      /* number of the member that may take it */
	__u8 state;        /* 0 open, 1 closing */
	__u8 members;      /* entries that follow */
	__be16 idle;       /* hops since anything changed */
	__be16 ranges;     /* missing ranges after the entries */
	__be32 sent;       /* distinct fragments sent in the open round */
	__s8 unit;         /* log2 of the accumulators' unit, open round */
	__s8 unit_before;  /* the same, of the round committed last */
	__be16 stripe;     /* 0; room for several tokens */
	__be64 listed;     /* closing: whose gradients are in; bit k - 1 is member k */
	__be32 settled;    /* where a switch adds: sums from the first on that all have */
	__be32 reserved;   /* 0 */
};
_Static_assert(sizeof(struct nicps_token) == 40, "struct nicps_token has a hole");

/* One member's line in the token; the k-th is that of member k. */
struct nicps_entry {
	__be32 samples_before; /* samples counted in the round committed last */
	__be32 samples;        /* samples counted in the open round */
	__be32 ready;          /* samples worked so far, not yet sent; where a switch adds a closed list: sums here */
	__be32 digest;         /* of weights, buffers and optimizer after round `read`; 0: none */
	__be16 read;           /* last round read out and applied, its low 16 bits */
	__u8 marks;            /* mark mask */
	__s8 unit;             /* log2 of the unit wanted for the next round */
};
_Static_assert(sizeof(struct nicps_entry) == 20, "struct nicps_entry has a hole");

/* Fragments that some member lacks; only their sender repairs. Of sums that a switch adds, all send again. */
struct nicps_range {
	__be32 first;  /* first missing fragment */
	__be16 count;  /* how many in a row */
	__be16 sender; /* member that sent them; of sums, the member that lacks them */
};
_Static_assert(sizeof(struct nicps_range) == 8, "struct nicps_range has a hole");

/* R1: the starter asks who takes part; the tail is its name. R20: the lead calls standby hosts; it is the job's. */
struct nicps_call {
	__be64 nonce;  /* names this formation; 0: the job admits nobody, and no answer is wanted */
	__be32 view;   /* in force at the caller; 0 if it starts a network */
	__be32 ballot; /* under which that view was installed; in no view: the group that forms, 0 for a job */
};
_Static_assert(sizeof(struct nicps_call) == 16, "struct nicps_call has a hole");

/* R2, R20: a host takes part. The tail is its name. */
struct nicps_answer {
	__be64 nonce;  /* of the call */
	__be64 fresh;  /* random: the list that takes this host in must name it */
	__be32 view;   /* highest view this host has been in */
	__u8 stage;    /* 0 nothing of the job, 1 its files, 2 a training program that waits, 3 only asks, 4 a program that waits for a group */
	__u8 reserved; /* 0 */
	__be16 group;  /* with stage 4: which group, a hash of its name and size */
};
_Static_assert(sizeof(struct nicps_answer) == 24, "struct nicps_answer has a hole");

/* A member list is proposed, or in force (R3, R17, R18, R20). A proposal without a value asks for promises. */
struct nicps_view {
	__be64 live;      /* propose: whom the proposer hears; bit k - 1 is member k */
	__be64 nonce;     /* install: the fresh one of whom it is for; ask: one of who asks */
	__be32 number;    /* of the view */
	__be32 base;      /* of the view that it follows; 0 if none */
	__be32 ballot;    /* with the sender's MAC: orders proposals */
	__be16 addressee; /* install: member that it is for; 0: who has asked */
	__u8 members;     /* entries of the list */
	__u8 values;      /* 1: the value follows; 0: none yet */
	__u8 step;        /* 1 propose, 2 accept, 3 install, 4 ask */
	__u8 ended;       /* install: 1 if its job has ended, 2 if it is done; 0 otherwise */
	__u8 channels;    /* of the value: standings behind the list, of channels 1 and up */
	__u8 reserved2;   /* 0 */
	__be32 reserved3; /* 0 */
};
_Static_assert(sizeof(struct nicps_view) == 40, "struct nicps_view has a hole");

/* What a view is, besides its list: who is in, who leads, and where the job goes on. */
struct nicps_view_value {
	__be64 live;    /* members that are in; bit k - 1 is member k */
	__u8 seed[16];  /* what the view's keys are made of */
	__be32 follows; /* phase that goes on, by its old number; 0: none */
	__be32 phase;   /* its number in this view */
	__be32 round;   /* round that is open; whoever is in the one before commits it */
	__be16 lead;    /* acts as node 1 (R22) */
	__s8 unit;      /* log2 of the accumulators' unit, open round */
	__u8 saves;     /* 1: the lead writes a checkpoint of the state after the round before that one */
};
_Static_assert(sizeof(struct nicps_view_value) == 40, "struct nicps_view_value has a hole");

/* One member of a list; the k-th is member k. */
struct nicps_view_member {
	__u8 mac[6];   /* MAC address */
	__u8 name[14]; /* host name, UTF-8, zero padded */
};
_Static_assert(sizeof(struct nicps_view_member) == 20, "struct nicps_view_member has a hole");

/* Where the job goes on in a channel above 0: its round that is open. `complete` is 0. */
struct nicps_view_channel {
	__u8 channel;      /* its number */
	__u8 complete;     /* vote: 1: has all of its closed list */
	__be16 round_high; /* the open round's number, its high 16 bits */
	__be16 round_low;  /* the same, its low ones */
};
_Static_assert(sizeof(struct nicps_view_channel) == 6, "struct nicps_view_channel has a hole");

/* Where a member stands in a channel above 0 (docs/channels.md). */
struct nicps_standing {
	__u8 channel;      /* its number */
	__u8 complete;     /* vote: 1: has all of its closed list */
	__be16 round_high; /* the open round's number, its high 16 bits */
	__be16 round_low;  /* the same, its low ones */
};
_Static_assert(sizeof(struct nicps_standing) == 6, "struct nicps_standing has a hole");

/* R18: a member promises, accepts or has installed; a promise carries what it has accepted before. */
struct nicps_vote {
	__be64 nonce;           /* fresh: the list that is installed must name it */
	__be32 ballot;          /* of the proposal; promised already, if the step is 0 */
	__be32 phase;           /* in force here, by number; 0: none */
	__be32 round;           /* that is open here */
	__be32 decided;         /* highest decision heard of */
	__u8 mac[6];            /* the proposer's */
	__u8 step;              /* 1 promised, 2 accepted, 3 installed; 0 refused */
	__u8 complete;          /* 1: has all of the open round's closed list; 2: the job is over; 4: no state; 16, 32: the lead saves the state after the open round, after the one before */
	__be32 accepted_ballot; /* of the value accepted last */
	__u8 accepted_mac[6];   /* of that ballot's proposer */
	__u8 members;           /* entries of the list accepted */
	__u8 values;            /* 1: the value accepted follows */
	__u8 channels;          /* of that value: standings behind its list */
	__u8 standings;         /* standings at the end: of this member in channels 1 and up */
	__be16 reserved;        /* 0 */
};
_Static_assert(sizeof(struct nicps_vote) == 48, "struct nicps_vote has a hole");

/* Node 1 opens the next phase. The tail is its settings as JSON. In force once all have acknowledged. */
struct nicps_decision {
	__be32 number;     /* 1, 2, ... in a view */
	__be32 generation; /* of the token that the phase starts with */
	__u8 phase;        /* 1 hand-out, 2 train, 3 test, 4 finish, 5 stop */
	__u8 reserved;     /* 0 */
	__be16 reserved2;  /* 0 */
	__be32 reserved3;  /* 0 */
};
_Static_assert(sizeof(struct nicps_decision) == 16, "struct nicps_decision has a hole");

/* A member has heard a decision; once it is prepared, the tail may hold an answer as JSON. */
struct nicps_ack {
	__be32 number;    /* of the decision */
	__u8 prepared;    /* 1: prepared; 0: heard, still preparing */
	__u8 reserved;    /* 0 */
	__be16 reserved2; /* 0 */
};
_Static_assert(sizeof(struct nicps_ack) == 8, "struct nicps_ack has a hole");

/* A member without the token tells what it has; with TOKEN_WANTED the holder of a parked one hands it over. */
struct nicps_want {
	__be32 ready;  /* samples worked so far in the round */
	__be32 read;   /* last round read out and applied */
	__be32 digest; /* of the state after that round; 0: none */
	__s8 unit;     /* with OFFERED: log2 of the step of its coarsest fragment */
	__u8 window;   /* with OFFERED: fragments to an aggregator at a time; 0: any */
	__be16 lacks;  /* entries that follow: what is sent again and does not come */
};
_Static_assert(sizeof(struct nicps_want) == 16, "struct nicps_want has a hole");

/* A member's fragments of the open round that the sender of a WANT lacks, and does not get. */
struct nicps_lack {
	__be32 count;    /* fragments of that member that are lacking */
	__be16 member;   /* member that sends them */
	__be16 reserved; /* 0 */
};
_Static_assert(sizeof(struct nicps_lack) == 8, "struct nicps_lack has a hole");

/* A member cannot go on, nor can the job anywhere; the tail says why, in one line. Or its user cancels the job. */
struct nicps_fail {
	__u8 cancels;     /* 1: the user cancels the job, which is saved first; 0 otherwise */
	__u8 reserved;    /* 0 */
	__be16 reserved2; /* 0 */
	__be32 reserved3; /* 0 */
};
_Static_assert(sizeof(struct nicps_fail) == 8, "struct nicps_fail has a hole");

/* R17: this member departs; the others go on. The tail says why, in one line. */
struct nicps_leave {
	__be64 reserved; /* 0 */
};
_Static_assert(sizeof(struct nicps_leave) == 8, "struct nicps_leave has a hole");

/* A host measures the LAN, in no view; the tail of a train's frame is as long as a fragment's payload. */
struct nicps_probe {
	__be64 nonce;     /* names the train */
	__be32 number;    /* of the question, or in the train */
	__u8 step;        /* 1 ask, 2 one frame of the train */
	__u8 reserved;    /* 0 */
	__be16 reserved2; /* 0 */
};
_Static_assert(sizeof(struct nicps_probe) == 16, "struct nicps_probe has a hole");

/* The answer to a question: what has come of that train. The tail is the host's name. */
struct nicps_echo {
	__be64 nonce;     /* of the train */
	__be64 first_ns;  /* when its first frame came, by this host's own clock */
	__be64 last_ns;   /* the same of its last */
	__be32 count;     /* frames of it that came */
	__be32 number;    /* of the question */
	__u8 busy;        /* 1: a job is under way here, or a measurement of its own */
	__u8 reserved;    /* 0 */
	__be16 reserved2; /* 0 */
	__be32 tagged;    /* frames of it that came with an 802.1p tag */
};
_Static_assert(sizeof(struct nicps_echo) == 40, "struct nicps_echo has a hole");

/* One frame's worth of a gradient in stripes, to its aggregator; `PAYLOAD_BYTES` of lanes follow. */
struct nicps_contribution {
	__be64 members;   /* the closed list; bit k - 1 is member k */
	__be32 index;     /* place in the vector, from 0 */
	__be32 fragments; /* fragments in the vector */
	__be32 number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent; 127: not finite */
	__s8 unit;        /* log2 of what all sums of the round are multiples of */
	__u8 behind;      /* to a switch: it adds the remainder of so many rounds before; 0: of none */
};
_Static_assert(sizeof(struct nicps_contribution) == 24, "struct nicps_contribution has a hole");

/* The sum of the list's contributions, as wide as one of them. The lanes follow. */
struct nicps_sum {
	__be64 members;   /* the closed list; bit k - 1 is member k */
	__be32 index;     /* place in the vector, from 0 */
	__be32 fragments; /* fragments in the vector */
	__be32 number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent; 127: not finite */
	__s8 unit;        /* log2 of what all sums of the round are multiples of */
	__u8 behind;      /* to a switch: it adds the remainder of so many rounds before; 0: of none */
};
_Static_assert(sizeof(struct nicps_sum) == 24, "struct nicps_sum has a hole");

/* A member asks for a sum; `number` is the question's. As long as the answer, which is written over it. */
struct nicps_ask {
	__be64 members;   /* the closed list; bit k - 1 is member k */
	__be32 index;     /* place in the vector, from 0 */
	__be32 fragments; /* fragments in the vector */
	__be32 number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent; 127: not finite */
	__s8 unit;        /* log2 of what all sums of the round are multiples of */
	__u8 behind;      /* to a switch: it adds the remainder of so many rounds before; 0: of none */
};
_Static_assert(sizeof(struct nicps_ask) == 24, "struct nicps_ask has a hole");

/* The answer where a sum is not made yet; `members` have not contributed. `PAYLOAD_BYTES` of no meaning follow. */
struct nicps_lacking {
	__be64 members;   /* the closed list; bit k - 1 is member k */
	__be32 index;     /* place in the vector, from 0 */
	__be32 fragments; /* fragments in the vector */
	__be32 number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent; 127: not finite */
	__s8 unit;        /* log2 of what all sums of the round are multiples of */
	__u8 behind;      /* to a switch: it adds the remainder of so many rounds before; 0: of none */
};
_Static_assert(sizeof(struct nicps_lacking) == 24, "struct nicps_lacking has a hole");

/* A part of a worker's step, to the server that holds these parameters; `PAYLOAD_BYTES` of lanes follow. */
struct nicps_push {
	__be32 version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
	__be32 number;    /* of this worker's step, or of its pull; repeated in the answer */
	__be32 index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
	__be32 fragments; /* of these in the vector */
	__be32 staleness; /* answers to a push: what was fixed for it; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8; pull, held: 32 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent */
	__u8 reason;      /* taken: 0, or why it is not done; else 0 */
	__u8 reserved;    /* 0 */
};
_Static_assert(sizeof(struct nicps_push) == 24, "struct nicps_push has a hole");

/* A worker lacks these parameters. As long as the answer, which is written over it. */
struct nicps_pull {
	__be32 version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
	__be32 number;    /* of this worker's step, or of its pull; repeated in the answer */
	__be32 index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
	__be32 fragments; /* of these in the vector */
	__be32 staleness; /* answers to a push: what was fixed for it; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8; pull, held: 32 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent */
	__u8 reason;      /* taken: 0, or why it is not done; else 0 */
	__u8 reserved;    /* 0 */
};
_Static_assert(sizeof(struct nicps_pull) == 24, "struct nicps_pull has a hole");

/* The answer to a pull, and to a push of 32-bit lanes: `PAYLOAD_BYTES` of parameters follow, 32 bits each. */
struct nicps_held {
	__be32 version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
	__be32 number;    /* of this worker's step, or of its pull; repeated in the answer */
	__be32 index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
	__be32 fragments; /* of these in the vector */
	__be32 staleness; /* answers to a push: what was fixed for it; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8; pull, held: 32 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent */
	__u8 reason;      /* taken: 0, or why it is not done; else 0 */
	__u8 reserved;    /* 0 */
};
_Static_assert(sizeof(struct nicps_held) == 24, "struct nicps_held has a hole");

/* The answer to a push of narrower lanes, to a repeated one, and to a contribution; or why not. Nothing follows. */
struct nicps_taken {
	__be32 version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
	__be32 number;    /* of this worker's step, or of its pull; repeated in the answer */
	__be32 index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
	__be32 fragments; /* of these in the vector */
	__be32 staleness; /* answers to a push: what was fixed for it; else 0 */
	__u8 width;       /* bits of a lane: 32, 16, 8; pull, held: 32 */
	__s8 exponent;    /* of the lanes: value = lane * 2**exponent */
	__u8 reason;      /* taken: 0, or why it is not done; else 0 */
	__u8 reserved;    /* 0 */
};
_Static_assert(sizeof(struct nicps_taken) == 24, "struct nicps_taken has a hole");

/* A part of a member's numbers in a direct call (docs/direct.md); `SHORT_BYTES` or `PAYLOAD_BYTES` of them follow. */
struct nicps_numbers {
	__be32 call;    /* checksum of what is called; the same at all members */
	__be32 number;  /* direct calls on the channel since the last round, before this one */
	__be16 size;    /* bytes of this member's numbers */
	__u8 index;     /* place among the fragments, from 0 */
	__u8 fragments; /* fragments of this member's numbers */
	__be32 view;    /* the call's view; in an answer to SETTLE, an earlier one */
};
_Static_assert(sizeof(struct nicps_numbers) == 16, "struct nicps_numbers has a hole");

/* Its sender has the numbers of all members in that call. Nothing follows. */
struct nicps_marked {
	__be32 call;    /* checksum of what is called; the same at all members */
	__be32 number;  /* direct calls on the channel since the last round, before this one */
	__be16 size;    /* bytes of this member's numbers */
	__u8 index;     /* place among the fragments, from 0 */
	__u8 fragments; /* fragments of this member's numbers */
	__be32 view;    /* the call's view; in an answer to SETTLE, an earlier one */
};
_Static_assert(sizeof(struct nicps_marked) == 16, "struct nicps_marked has a hole");

/* Its sender goes on without that call, and never marks it. Nothing follows. */
struct nicps_withdrawn {
	__be32 call;    /* checksum of what is called; the same at all members */
	__be32 number;  /* direct calls on the channel since the last round, before this one */
	__be16 size;    /* bytes of this member's numbers */
	__u8 index;     /* place among the fragments, from 0 */
	__u8 fragments; /* fragments of this member's numbers */
	__be32 view;    /* the call's view; in an answer to SETTLE, an earlier one */
};
_Static_assert(sizeof(struct nicps_withdrawn) == 16, "struct nicps_withdrawn has a hole");

/* The view has changed before its sender had the marks of all: has this member marked it? Nothing follows. */
struct nicps_settle {
	__be32 call;    /* checksum of what is called; the same at all members */
	__be32 number;  /* direct calls on the channel since the last round, before this one */
	__be16 size;    /* bytes of this member's numbers */
	__u8 index;     /* place among the fragments, from 0 */
	__u8 fragments; /* fragments of this member's numbers */
	__be32 view;    /* the call's view; in an answer to SETTLE, an earlier one */
};
_Static_assert(sizeof(struct nicps_settle) == 16, "struct nicps_settle has a hole");

/* Pieces of streams: in no view what scripts print (docs/run.md), in a view a group's store (docs/collective.md). */
struct nicps_script {
	__be64 run;       /* random, of this run; or of this group and view */
	__be64 at;        /* bytes of the stream before the piece; END: all; SEEN: all that came, and 1 for the END */
	__u8 step;        /* what it is for */
	__u8 rank;        /* of the host whose script it is; the number of the stream's member */
	__be16 waits;     /* OUTPUT: 1 while the script waits for its group to form */
	__u8 stream;      /* OUTPUT: where the script has printed the piece */
	__u8 reserved;    /* 0 */
	__be16 reserved2; /* 0 */
};
_Static_assert(sizeof(struct nicps_script) == 24, "struct nicps_script has a hole");

/* Between a Linux switch that adds (sender 0) and the members that believe it (docs/linux-switch.md). */
struct nicps_switch {
	__be64 boot;      /* random, of this start of the switch */
	__be64 nonce;     /* hello: a fresh one; grant: that of the hello */
	__be64 members;   /* ready: whose grants of this view are here; bit k - 1 is member k */
	__be32 number;    /* grant, ready: of the view */
	__be32 fragments; /* grant: of the vectors to come, 0: unknown; ready: room for such */
	__u8 width;       /* bits of a lane of these */
	__u8 step;        /* 1 hello, 2 grant, 3 ready */
	__be16 reserved;  /* 0 */
	__be32 reserved2; /* 0 */
};
_Static_assert(sizeof(struct nicps_switch) == 40, "struct nicps_switch has a hole");

/* What a switch must know to add in a view; the live members follow, in order of their numbers. */
struct nicps_grant {
	__u8 seed[16];    /* that the view was agreed on with: it names the list */
	__u8 siphash[16]; /* key of tokens and fragments; zeros without one */
	__u8 name[14];    /* of the host that grants, UTF-8, zero padded */
	__be16 lead;      /* acts as node 1 (R22) */
};
_Static_assert(sizeof(struct nicps_grant) == 48, "struct nicps_grant has a hole");

/* A live member. */
struct nicps_grant_member {
	__u8 mac[6];   /* MAC address */
	__be16 number; /* from 1 */
};
_Static_assert(sizeof(struct nicps_grant_member) == 8, "struct nicps_grant_member has a hole");

#endif /* NICPS_WIRE_H */
