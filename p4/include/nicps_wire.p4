// SPDX-License-Identifier: Apache-2.0
// The wire of nicps, for P4-16. Generated from nicps/wire by
// `python -m nicps.wiregen`: change it there.
#ifndef NICPS_WIRE_P4
#define NICPS_WIRE_P4

const bit<8> NICPS_VERSION = 1;                     /* first byte of every frame of ours */
const bit<16> NICPS_ETHERTYPE = 0x88b5;             /* IEEE 802 local experimental; settable */
const bit<16> NICPS_MAX_MEMBERS = 64;               /* members of a network */
const bit<16> NICPS_PAYLOAD_BYTES = 1440;           /* payload of a fragment */
const bit<16> NICPS_BLOCK_LANES = 1440;             /* accumulators in a block of the map */
const bit<16> NICPS_MAX_FRAME_BYTES = 1500;         /* longest frame, from version on */
const bit<8> NICPS_MAX_CHANNELS = 8;                /* channels of a phase */
const bit<16> NICPS_CHANNEL_MASK = 57344;           /* bits of `flags`: the channel's number */
const bit<8> NICPS_CHANNEL_SHIFT = 13;              /* the lowest of these bits */
const bit<8> NICPS_SHORT_BYTES = 64;                /* payload of a short fragment there */
const bit<16> NICPS_NAME_BYTES = 14;                /* host name in a member list */
const bit<16> NICPS_QUANTUM = 256;                  /* fragments by which a member may be ahead of its sums, where a switch adds */
const bit<48> NICPS_SWITCH = 2673237782643;         /* MAC address of a switch that adds */
const bit<16> NICPS_ETHERNET_BYTES = 14;            /* Ethernet header, before version */
const bit<16> NICPS_HEADER_BYTES = 32;              /* header */
const bit<16> NICPS_FRAGMENT_HEADER_BYTES = 48;     /* header and fragment */
const bit<16> NICPS_CONTRIBUTION_HEADER_BYTES = 56; /* header and contribution, or sum, ask, lacking */
const bit<16> NICPS_PUSH_HEADER_BYTES = 56;         /* header and push, pull, held, taken */
const bit<8> NICPS_NOT_FINITE = 127;                /* exponent of lanes that are not finite */
const bit<16> NICPS_TOKEN_HEADER_BYTES = 72;        /* header and token */
const bit<16> NICPS_ENTRY_BYTES = 20;               /* a member's line in the token */
const bit<16> NICPS_RANGE_BYTES = 8;                /* a missing range in the token */
const bit<8> NICPS_MAX_SHIFT_0 = 0;                 /* shift of raw bytes */
const bit<8> NICPS_MAX_SHIFT_8 = 50;                /* largest shift, lanes of 8 bits */
const bit<8> NICPS_MAX_SHIFT_16 = 42;               /* largest shift, lanes of 16 bits */
const bit<8> NICPS_MAX_SHIFT_32 = 26;               /* largest shift, lanes of 32 bits */

// The header's `type`.
const bit<8> NICPS_TYPE_CALL = 1;          /* R1, R20: who takes part, who comes back? */
const bit<8> NICPS_TYPE_ANSWER = 2;        /* R2, R20: I do */
const bit<8> NICPS_TYPE_VIEW = 3;          /* R3, R17, R20: a member list is proposed, or in force */
const bit<8> NICPS_TYPE_DECISION = 4;      /* R5 to R7, R14: node 1 decides, all acknowledge */
const bit<8> NICPS_TYPE_ACK = 5;
const bit<8> NICPS_TYPE_TOKEN = 6;         /* R9, R10 */
const bit<8> NICPS_TYPE_FRAGMENT = 7;      /* R10, R11 */
const bit<8> NICPS_TYPE_WANT = 8;          /* a member has become ready while the token is parked */
const bit<8> NICPS_TYPE_FAIL = 9;          /* a member cannot go on, nor can the job */
const bit<8> NICPS_TYPE_VOTE = 10;         /* R18: what a member says of a proposed list */
const bit<8> NICPS_TYPE_LEAVE = 11;        /* R17: a member departs by itself */
const bit<8> NICPS_TYPE_PROBE = 12;        /* `nicps doctor --network` asks, or sends one frame of a train */
const bit<8> NICPS_TYPE_ECHO = 13;         /* what a host has counted of a train */
const bit<8> NICPS_TYPE_CONTRIBUTION = 14; /* in stripes: a member's part of a sum, to the aggregator */
const bit<8> NICPS_TYPE_SUM = 15;          /* in stripes: the aggregator's, to all, or to who has asked */
const bit<8> NICPS_TYPE_ASK = 16;          /* in stripes: a member lacks that sum */
const bit<8> NICPS_TYPE_LACKING = 17;      /* in stripes: it cannot be made yet, and whose part is lacking */
const bit<8> NICPS_TYPE_SWITCH = 18;       /* a Linux switch that adds, and the members that believe it */
const bit<8> NICPS_TYPE_SCRIPT = 19;       /* what a host's script prints, to the host that started it; the store of a group */
const bit<8> NICPS_TYPE_PUSH = 20;         /* with servers: a part of a worker's step, to the server that adds it */
const bit<8> NICPS_TYPE_PULL = 21;         /* with servers: a worker lacks these parameters; to a server, or to its partner */
const bit<8> NICPS_TYPE_HELD = 22;         /* with servers: the answer, these parameters */
const bit<8> NICPS_TYPE_TAKEN = 23;        /* with servers: a part of a step is added, or why something is not done */
const bit<8> NICPS_TYPE_NUMBERS = 24;      /* of a direct call: a part of a member's numbers, to all */
const bit<8> NICPS_TYPE_MARKED = 25;       /* of a direct call: its sender has the numbers of all */
const bit<8> NICPS_TYPE_WITHDRAWN = 26;    /* of a direct call: its sender never marks it */
const bit<8> NICPS_TYPE_SETTLE = 27;       /* of a direct call of an earlier view: has the member marked it, or will it never? */

// The header's `flags`. Their three highest bits are the number of the frame's channel (`CHANNEL_MASK`).
const bit<16> NICPS_FLAG_REPEAT = 1;        /* R16: sent before; WANT: an answer, which needs none */
const bit<16> NICPS_FLAG_BOUNCED = 2;       /* handed on by the kernel */
const bit<16> NICPS_FLAG_PARKED = 4;        /* the owner keeps the token: nothing to do */
const bit<16> NICPS_FLAG_REPAIR = 8;        /* a fragment sent again on request */
const bit<16> NICPS_FLAG_TOKEN_WANTED = 16; /* WANT: hand me the token */
const bit<16> NICPS_FLAG_ADD = 32;          /* a fragment that the switch is to add; of sender 0, the sum */
const bit<16> NICPS_FLAG_ANSWER = 64;       /* made by the XDP program out of a frame that came: it has numbers of its own */
const bit<16> NICPS_FLAG_COMPLETE = 128;    /* WANT: this member has all that the round's closed list comes to; NUMBERS: those of all */
const bit<16> NICPS_FLAG_OFFERED = 256;     /* WANT: this member contributes `ready` samples, in steps up to `unit` */
const bit<16> NICPS_FLAG_SAVES = 512;       /* with COMPLETE: as the mark SAVES; with a stop, as that of the round before */
const bit<16> NICPS_FLAG_GOES_ON = 1024;    /* WANT: as the mark GOES_ON */

// The token's `state`: gradients may still come, or the list is closed.
const bit<8> NICPS_STATE_OPEN = 0;
const bit<8> NICPS_STATE_CLOSING = 1;

// A member's `marks` in the token, about the open round.
const bit<8> NICPS_MARK_CONTRIBUTED = 1;
const bit<8> NICPS_MARK_COMPLETE = 2;    /* has every fragment of the list */
const bit<8> NICPS_MARK_SKIPPED = 4;     /* had a gradient that does not fit the unit: asks for a larger one */
const bit<8> NICPS_MARK_SAVES = 8;       /* R22: the lead's: it writes a checkpoint of the state after this round */
const bit<8> NICPS_MARK_SAVED = 16;      /* the same, of the round committed last */
const bit<8> NICPS_MARK_GOES_ON = 32;    /* with servers: it knows that all workers have read the round before, and may push */

// What a decision starts: a series of rounds, except FINISH and STOP.
const bit<8> NICPS_PHASE_HANDOUT = 1; /* R5, R6: raw bytes of one member to all */
const bit<8> NICPS_PHASE_TRAIN = 2;   /* R8 to R13 */
const bit<8> NICPS_PHASE_TEST = 3;    /* R15: one round of two lanes, succeeded and failed */
const bit<8> NICPS_PHASE_FINISH = 4;  /* R14: save the model; the acknowledgement tells what there is to collect */
const bit<8> NICPS_PHASE_STOP = 5;    /* back to standby, after the end or because the job failed */

// Of a VIEW frame, and of the VOTE that answers it.
const bit<8> NICPS_STEP_PROPOSE = 1; /* R17: somebody has left; promise to follow */
const bit<8> NICPS_STEP_ACCEPT = 2;  /* R18: this list, if a majority agrees */
const bit<8> NICPS_STEP_INSTALL = 3; /* R3, R18: it is in force */
const bit<8> NICPS_STEP_ASK = 4;     /* R4: a switch's controller asks which one is in force */

// How far a host is that answers a call.
const bit<8> NICPS_STAGE_NOTHING = 0; /* it has nothing of the job */
const bit<8> NICPS_STAGE_FILES = 1;   /* it has the job's files; its training program starts */
const bit<8> NICPS_STAGE_WAITING = 2; /* its training program waits for the state */
const bit<8> NICPS_STAGE_ASKS = 3;    /* it only wants to be told which view is in force */
const bit<8> NICPS_STAGE_GROUP = 4;   /* it is in no job; a program waits for the group that the answer names */

// Of a PROBE frame.
const bit<8> NICPS_PROBE_STEP_ASK = 1;   /* count the train of this nonce from now on, and say what was counted so far */
const bit<8> NICPS_PROBE_STEP_TRAIN = 2; /* one of many, as long as a fragment: counted in the kernel, and dropped */

// Of a TAKEN frame: why what was asked is not done.
const bit<8> NICPS_REFUSAL_NONE = 0;          /* it is done, now or before */
const bit<8> NICPS_REFUSAL_SYNCHRONISING = 1; /* the round's synchronisation has begun there: ask after its commit */
const bit<8> NICPS_REFUSAL_NOT_YET = 2;       /* of a round that is not open there yet */
const bit<8> NICPS_REFUSAL_ABSENT = 3;        /* a partner does not have these parameters of this round */
const bit<8> NICPS_REFUSAL_FULL = 4;          /* a parameter there has come near the limits of its numbers */

// Of a SWITCH frame.
const bit<8> NICPS_SWITCH_STEP_HELLO = 1; /* the switch asks which view is in force */
const bit<8> NICPS_SWITCH_STEP_GRANT = 2; /* a member says so, and gives it the view's key */
const bit<8> NICPS_SWITCH_STEP_READY = 3; /* the switch adds for these members */

// Of a SCRIPT frame.
const bit<8> NICPS_SCRIPT_STEP_OUTPUT = 1; /* a piece of what the script has printed; an empty one is a sign of life; or of a store's stream */
const bit<8> NICPS_SCRIPT_STEP_END = 2;    /* the script has ended; the tail says how, as JSON */
const bit<8> NICPS_SCRIPT_STEP_SEEN = 3;   /* the host that started it has all up to there; of the sequencer's stream by itself: all members do */
const bit<8> NICPS_SCRIPT_STEP_KILL = 4;   /* end the script */

// Where a script has printed a piece of its output.
const bit<8> NICPS_SCRIPT_STREAM_STDOUT = 0; /* its standard output */
const bit<8> NICPS_SCRIPT_STREAM_STDERR = 1; /* its standard error */

// Common to all frames of ours; follows the Ethernet header.
header nicps_header_t {
    bit<8> version;   /* format version, 1 */
    bit<8> type;      /* frame type */
    bit<16> flags;    /* flag mask; bits 13 to 15 are the channel's number */
    bit<32> network;  /* hash of the network's name */
    bit<32> view;     /* number of the member list; 0 before any */
    bit<32> round;    /* round that the frame belongs to */
    bit<16> sender;   /* member number from 1; 0 if none yet */
    bit<16> length;   /* bytes from version on, without padding */
    bit<32> sequence; /* sender's frame counter; a repeat has a new one */
    bit<64> tag;      /* authentication tag; 0 on a trusted LAN */
}

// One frame's worth of a gradient (or of a hand-out); `PAYLOAD_BYTES` follow, zero padded.
header nicps_fragment_t {
    bit<32> index;     /* place in the contribution, from 0 */
    bit<32> fragments; /* fragments in the contribution */
    bit<16> lanes;     /* lanes in the payload, zeros included; bytes if raw */
    bit<8> width;      /* bits of a lane: 32, 16, 8; 0 is raw bytes */
    bit<8> shift;      /* left shift of every lane before it is added */
    bit<32> samples;   /* samples in the whole gradient */
}

// The right to broadcast (R9, R10), and the state of the open round.
header nicps_token_t {
    bit<32> generation; /* raised by whoever creates a token */
    bit<32> hop;        /* raised by every hand-on */
    bit<16> owner;      /* number of the member that may take it */
    bit<8> state;       /* 0 open, 1 closing */
    bit<8> members;     /* entries that follow */
    bit<16> idle;       /* hops since anything changed */
    bit<16> ranges;     /* missing ranges after the entries */
    bit<32> sent;       /* distinct fragments sent in the open round */
    int<8> unit;        /* log2 of the accumulators' unit, open round */
    int<8> unit_before; /* the same, of the round committed last */
    bit<16> stripe;     /* 0; room for several tokens */
    bit<64> listed;     /* closing: whose gradients are in; bit k - 1 is member k */
    bit<32> settled;    /* where a switch adds: sums from the first on that all have */
    bit<32> reserved;   /* 0 */
}

// One member's line in the token; the k-th is that of member k.
header nicps_entry_t {
    bit<32> samples_before; /* samples counted in the round committed last */
    bit<32> samples;        /* samples counted in the open round */
    bit<32> ready;          /* samples worked so far, not yet sent; where a switch adds a closed list: sums here */
    bit<32> digest;         /* of weights, buffers and optimizer after round `read`; 0: none */
    bit<16> read;           /* last round read out and applied, its low 16 bits */
    bit<8> marks;           /* mark mask */
    int<8> unit;            /* log2 of the unit wanted for the next round */
}

// Fragments that some member lacks; only their sender repairs. Of sums that a switch adds, all send again.
header nicps_range_t {
    bit<32> first;  /* first missing fragment */
    bit<16> count;  /* how many in a row */
    bit<16> sender; /* member that sent them; of sums, the member that lacks them */
}

// R1: the starter asks who takes part; the tail is its name. R20: the lead calls standby hosts; it is the job's.
header nicps_call_t {
    bit<64> nonce;  /* names this formation; 0: the job admits nobody, and no answer is wanted */
    bit<32> view;   /* in force at the caller; 0 if it starts a network */
    bit<32> ballot; /* under which that view was installed; in no view: the group that forms, 0 for a job */
}

// R2, R20: a host takes part. The tail is its name.
header nicps_answer_t {
    bit<64> nonce;   /* of the call */
    bit<64> fresh;   /* random: the list that takes this host in must name it */
    bit<32> view;    /* highest view this host has been in */
    bit<8> stage;    /* 0 nothing of the job, 1 its files, 2 a training program that waits, 3 only asks, 4 a program that waits for a group */
    bit<8> reserved; /* 0 */
    bit<16> group;   /* with stage 4: which group, a hash of its name and size */
}

// A member list is proposed, or in force (R3, R17, R18, R20). A proposal without a value asks for promises.
header nicps_view_t {
    bit<64> live;      /* propose: whom the proposer hears; bit k - 1 is member k */
    bit<64> nonce;     /* install: the fresh one of whom it is for; ask: one of who asks */
    bit<32> number;    /* of the view */
    bit<32> base;      /* of the view that it follows; 0 if none */
    bit<32> ballot;    /* with the sender's MAC: orders proposals */
    bit<16> addressee; /* install: member that it is for; 0: who has asked */
    bit<8> members;    /* entries of the list */
    bit<8> values;     /* 1: the value follows; 0: none yet */
    bit<8> step;       /* 1 propose, 2 accept, 3 install, 4 ask */
    bit<8> ended;      /* install: 1 if its job has ended, 2 if it is done; 0 otherwise */
    bit<8> channels;   /* of the value: standings behind the list, of channels 1 and up */
    bit<8> reserved2;  /* 0 */
    bit<32> reserved3; /* 0 */
}

// What a view is, besides its list: who is in, who leads, and where the job goes on.
header nicps_view_value_t {
    bit<64> live;    /* members that are in; bit k - 1 is member k */
    bit<128> seed;   /* what the view's keys are made of */
    bit<32> follows; /* phase that goes on, by its old number; 0: none */
    bit<32> phase;   /* its number in this view */
    bit<32> round;   /* round that is open; whoever is in the one before commits it */
    bit<16> lead;    /* acts as node 1 (R22) */
    int<8> unit;     /* log2 of the accumulators' unit, open round */
    bit<8> saves;    /* 1: the lead writes a checkpoint of the state after the round before that one */
}

// One member of a list; the k-th is member k.
header nicps_view_member_t {
    bit<48> mac;   /* MAC address */
    bit<112> name; /* host name, UTF-8, zero padded */
}

// Where the job goes on in a channel above 0: its round that is open. `complete` is 0.
header nicps_view_channel_t {
    bit<8> channel;     /* its number */
    bit<8> complete;    /* vote: 1: has all of its closed list */
    bit<16> round_high; /* the open round's number, its high 16 bits */
    bit<16> round_low;  /* the same, its low ones */
}

// Where a member stands in a channel above 0 (docs/channels.md).
header nicps_standing_t {
    bit<8> channel;     /* its number */
    bit<8> complete;    /* vote: 1: has all of its closed list */
    bit<16> round_high; /* the open round's number, its high 16 bits */
    bit<16> round_low;  /* the same, its low ones */
}

// R18: a member promises, accepts or has installed; a promise carries what it has accepted before.
header nicps_vote_t {
    bit<64> nonce;           /* fresh: the list that is installed must name it */
    bit<32> ballot;          /* of the proposal; promised already, if the step is 0 */
    bit<32> phase;           /* in force here, by number; 0: none */
    bit<32> round;           /* that is open here */
    bit<32> decided;         /* highest decision heard of */
    bit<48> mac;             /* the proposer's */
    bit<8> step;             /* 1 promised, 2 accepted, 3 installed; 0 refused */
    bit<8> complete;         /* 1: has all of the open round's closed list; 2: the job is over; 4: no state; 16, 32: the lead saves the state after the open round, after the one before */
    bit<32> accepted_ballot; /* of the value accepted last */
    bit<48> accepted_mac;    /* of that ballot's proposer */
    bit<8> members;          /* entries of the list accepted */
    bit<8> values;           /* 1: the value accepted follows */
    bit<8> channels;         /* of that value: standings behind its list */
    bit<8> standings;        /* standings at the end: of this member in channels 1 and up */
    bit<16> reserved;        /* 0 */
}

// Node 1 opens the next phase. The tail is its settings as JSON. In force once all have acknowledged.
header nicps_decision_t {
    bit<32> number;     /* 1, 2, ... in a view */
    bit<32> generation; /* of the token that the phase starts with */
    bit<8> phase;       /* 1 hand-out, 2 train, 3 test, 4 finish, 5 stop */
    bit<8> reserved;    /* 0 */
    bit<16> reserved2;  /* 0 */
    bit<32> reserved3;  /* 0 */
}

// A member has heard a decision; once it is prepared, the tail may hold an answer as JSON.
header nicps_ack_t {
    bit<32> number;    /* of the decision */
    bit<8> prepared;   /* 1: prepared; 0: heard, still preparing */
    bit<8> reserved;   /* 0 */
    bit<16> reserved2; /* 0 */
}

// A member without the token tells what it has; with TOKEN_WANTED the holder of a parked one hands it over.
header nicps_want_t {
    bit<32> ready;  /* samples worked so far in the round */
    bit<32> read;   /* last round read out and applied */
    bit<32> digest; /* of the state after that round; 0: none */
    int<8> unit;    /* with OFFERED: log2 of the step of its coarsest fragment */
    bit<8> window;  /* with OFFERED: fragments to an aggregator at a time; 0: any */
    bit<16> lacks;  /* entries that follow: what is sent again and does not come */
}

// A member's fragments of the open round that the sender of a WANT lacks, and does not get.
header nicps_lack_t {
    bit<32> count;    /* fragments of that member that are lacking */
    bit<16> member;   /* member that sends them */
    bit<16> reserved; /* 0 */
}

// A member cannot go on, nor can the job anywhere; the tail says why, in one line. Or its user cancels the job.
header nicps_fail_t {
    bit<8> cancels;    /* 1: the user cancels the job, which is saved first; 0 otherwise */
    bit<8> reserved;   /* 0 */
    bit<16> reserved2; /* 0 */
    bit<32> reserved3; /* 0 */
}

// R17: this member departs; the others go on. The tail says why, in one line.
header nicps_leave_t {
    bit<64> reserved; /* 0 */
}

// A host measures the LAN, in no view; the tail of a train's frame is as long as a fragment's payload.
header nicps_probe_t {
    bit<64> nonce;     /* names the train */
    bit<32> number;    /* of the question, or in the train */
    bit<8> step;       /* 1 ask, 2 one frame of the train */
    bit<8> reserved;   /* 0 */
    bit<16> reserved2; /* 0 */
}

// The answer to a question: what has come of that train. The tail is the host's name.
header nicps_echo_t {
    bit<64> nonce;     /* of the train */
    bit<64> first_ns;  /* when its first frame came, by this host's own clock */
    bit<64> last_ns;   /* the same of its last */
    bit<32> count;     /* frames of it that came */
    bit<32> number;    /* of the question */
    bit<8> busy;       /* 1: a job is under way here, or a measurement of its own */
    bit<8> reserved;   /* 0 */
    bit<16> reserved2; /* 0 */
    bit<32> tagged;    /* frames of it that came with an 802.1p tag */
}

// One frame's worth of a gradient in stripes, to its aggregator; `PAYLOAD_BYTES` of lanes follow.
header nicps_contribution_t {
    bit<64> members;   /* the closed list; bit k - 1 is member k */
    bit<32> index;     /* place in the vector, from 0 */
    bit<32> fragments; /* fragments in the vector */
    bit<32> number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent; 127: not finite */
    int<8> unit;       /* log2 of what all sums of the round are multiples of */
    bit<8> behind;     /* to a switch: it adds the remainder of so many rounds before; 0: of none */
}

// The sum of the list's contributions, as wide as one of them. The lanes follow.
header nicps_sum_t {
    bit<64> members;   /* the closed list; bit k - 1 is member k */
    bit<32> index;     /* place in the vector, from 0 */
    bit<32> fragments; /* fragments in the vector */
    bit<32> number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent; 127: not finite */
    int<8> unit;       /* log2 of what all sums of the round are multiples of */
    bit<8> behind;     /* to a switch: it adds the remainder of so many rounds before; 0: of none */
}

// A member asks for a sum; `number` is the question's. As long as the answer, which is written over it.
header nicps_ask_t {
    bit<64> members;   /* the closed list; bit k - 1 is member k */
    bit<32> index;     /* place in the vector, from 0 */
    bit<32> fragments; /* fragments in the vector */
    bit<32> number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent; 127: not finite */
    int<8> unit;       /* log2 of what all sums of the round are multiples of */
    bit<8> behind;     /* to a switch: it adds the remainder of so many rounds before; 0: of none */
}

// The answer where a sum is not made yet; `members` have not contributed. `PAYLOAD_BYTES` of no meaning follow.
header nicps_lacking_t {
    bit<64> members;   /* the closed list; bit k - 1 is member k */
    bit<32> index;     /* place in the vector, from 0 */
    bit<32> fragments; /* fragments in the vector */
    bit<32> number;    /* ask: its number; to a switch: view of the round `behind`; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent; 127: not finite */
    int<8> unit;       /* log2 of what all sums of the round are multiples of */
    bit<8> behind;     /* to a switch: it adds the remainder of so many rounds before; 0: of none */
}

// A part of a worker's step, to the server that holds these parameters; `PAYLOAD_BYTES` of lanes follow.
header nicps_push_t {
    bit<32> version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
    bit<32> number;    /* of this worker's step, or of its pull; repeated in the answer */
    bit<32> index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
    bit<32> fragments; /* of these in the vector */
    bit<32> staleness; /* answers to a push: what was fixed for it; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8; pull, held: 32 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent */
    bit<8> reason;     /* taken: 0, or why it is not done; else 0 */
    bit<8> reserved;   /* 0 */
}

// A worker lacks these parameters. As long as the answer, which is written over it.
header nicps_pull_t {
    bit<32> version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
    bit<32> number;    /* of this worker's step, or of its pull; repeated in the answer */
    bit<32> index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
    bit<32> fragments; /* of these in the vector */
    bit<32> staleness; /* answers to a push: what was fixed for it; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8; pull, held: 32 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent */
    bit<8> reason;     /* taken: 0, or why it is not done; else 0 */
    bit<8> reserved;   /* 0 */
}

// The answer to a pull, and to a push of 32-bit lanes: `PAYLOAD_BYTES` of parameters follow, 32 bits each.
header nicps_held_t {
    bit<32> version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
    bit<32> number;    /* of this worker's step, or of its pull; repeated in the answer */
    bit<32> index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
    bit<32> fragments; /* of these in the vector */
    bit<32> staleness; /* answers to a push: what was fixed for it; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8; pull, held: 32 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent */
    bit<8> reason;     /* taken: 0, or why it is not done; else 0 */
    bit<8> reserved;   /* 0 */
}

// The answer to a push of narrower lanes, to a repeated one, and to a contribution; or why not. Nothing follows.
header nicps_taken_t {
    bit<32> version;   /* push: the least of what was pulled there before; answers: the server's, before the lanes */
    bit<32> number;    /* of this worker's step, or of its pull; repeated in the answer */
    bit<32> index;     /* place in the vector, from 0; pull, held: in fragments of 32-bit lanes */
    bit<32> fragments; /* of these in the vector */
    bit<32> staleness; /* answers to a push: what was fixed for it; else 0 */
    bit<8> width;      /* bits of a lane: 32, 16, 8; pull, held: 32 */
    int<8> exponent;   /* of the lanes: value = lane * 2**exponent */
    bit<8> reason;     /* taken: 0, or why it is not done; else 0 */
    bit<8> reserved;   /* 0 */
}

// A part of a member's numbers in a direct call (docs/direct.md); `SHORT_BYTES` or `PAYLOAD_BYTES` of them follow.
header nicps_numbers_t {
    bit<32> call;     /* checksum of what is called; the same at all members */
    bit<32> number;   /* direct calls on the channel since the last round, before this one */
    bit<16> size;     /* bytes of this member's numbers */
    bit<8> index;     /* place among the fragments, from 0 */
    bit<8> fragments; /* fragments of this member's numbers */
    bit<32> view;     /* the call's view; in an answer to SETTLE, an earlier one */
}

// Its sender has the numbers of all members in that call. Nothing follows.
header nicps_marked_t {
    bit<32> call;     /* checksum of what is called; the same at all members */
    bit<32> number;   /* direct calls on the channel since the last round, before this one */
    bit<16> size;     /* bytes of this member's numbers */
    bit<8> index;     /* place among the fragments, from 0 */
    bit<8> fragments; /* fragments of this member's numbers */
    bit<32> view;     /* the call's view; in an answer to SETTLE, an earlier one */
}

// Its sender goes on without that call, and never marks it. Nothing follows.
header nicps_withdrawn_t {
    bit<32> call;     /* checksum of what is called; the same at all members */
    bit<32> number;   /* direct calls on the channel since the last round, before this one */
    bit<16> size;     /* bytes of this member's numbers */
    bit<8> index;     /* place among the fragments, from 0 */
    bit<8> fragments; /* fragments of this member's numbers */
    bit<32> view;     /* the call's view; in an answer to SETTLE, an earlier one */
}

// The view has changed before its sender had the marks of all: has this member marked it? Nothing follows.
header nicps_settle_t {
    bit<32> call;     /* checksum of what is called; the same at all members */
    bit<32> number;   /* direct calls on the channel since the last round, before this one */
    bit<16> size;     /* bytes of this member's numbers */
    bit<8> index;     /* place among the fragments, from 0 */
    bit<8> fragments; /* fragments of this member's numbers */
    bit<32> view;     /* the call's view; in an answer to SETTLE, an earlier one */
}

// Pieces of streams: in no view what scripts print (docs/run.md), in a view a group's store (docs/collective.md).
header nicps_script_t {
    bit<64> run;       /* random, of this run; or of this group and view */
    bit<64> at;        /* bytes of the stream before the piece; END: all; SEEN: all that came, and 1 for the END */
    bit<8> step;       /* what it is for */
    bit<8> rank;       /* of the host whose script it is; the number of the stream's member */
    bit<16> waits;     /* OUTPUT: 1 while the script waits for its group to form */
    bit<8> stream;     /* OUTPUT: where the script has printed the piece */
    bit<8> reserved;   /* 0 */
    bit<16> reserved2; /* 0 */
}

// Between a Linux switch that adds (sender 0) and the members that believe it (docs/linux-switch.md).
header nicps_switch_t {
    bit<64> boot;      /* random, of this start of the switch */
    bit<64> nonce;     /* hello: a fresh one; grant: that of the hello */
    bit<64> members;   /* ready: whose grants of this view are here; bit k - 1 is member k */
    bit<32> number;    /* grant, ready: of the view */
    bit<32> fragments; /* grant: of the vectors to come, 0: unknown; ready: room for such */
    bit<8> width;      /* bits of a lane of these */
    bit<8> step;       /* 1 hello, 2 grant, 3 ready */
    bit<16> reserved;  /* 0 */
    bit<32> reserved2; /* 0 */
}

// What a switch must know to add in a view; the live members follow, in order of their numbers.
header nicps_grant_t {
    bit<128> seed;    /* that the view was agreed on with: it names the list */
    bit<128> siphash; /* key of tokens and fragments; zeros without one */
    bit<112> name;    /* of the host that grants, UTF-8, zero padded */
    bit<16> lead;     /* acts as node 1 (R22) */
}

// A live member.
header nicps_grant_member_t {
    bit<48> mac;    /* MAC address */
    bit<16> number; /* from 1 */
}

#endif  // NICPS_WIRE_P4
