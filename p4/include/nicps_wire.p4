// SPDX-License-Identifier: Apache-2.0
// The wire of nicps, for P4-16. Generated from nicps/wire.py by
// `python -m nicps.wiregen`: change it there.
#ifndef NICPS_WIRE_P4
#define NICPS_WIRE_P4

const bit<8> NICPS_VERSION = 1;                 /* first byte of every frame of ours */
const bit<16> NICPS_ETHERTYPE = 0x88b5;         /* IEEE 802 local experimental; settable */
const bit<16> NICPS_MAX_MEMBERS = 64;           /* members of a network */
const bit<16> NICPS_PAYLOAD_BYTES = 1440;       /* payload of a fragment */
const bit<16> NICPS_BLOCK_LANES = 1440;         /* accumulators in a block of the map */
const bit<16> NICPS_MAX_FRAME_BYTES = 1500;     /* longest frame, from version on */
const bit<16> NICPS_NAME_BYTES = 14;            /* host name in a member list */
const bit<16> NICPS_HEADER_BYTES = 32;          /* header */
const bit<16> NICPS_FRAGMENT_HEADER_BYTES = 48; /* header and fragment */
const bit<16> NICPS_TOKEN_HEADER_BYTES = 56;    /* header and token */
const bit<8> NICPS_MAX_SHIFT_0 = 0;             /* shift of raw bytes */
const bit<8> NICPS_MAX_SHIFT_8 = 50;            /* largest shift, lanes of 8 bits */
const bit<8> NICPS_MAX_SHIFT_16 = 42;           /* largest shift, lanes of 16 bits */
const bit<8> NICPS_MAX_SHIFT_32 = 26;           /* largest shift, lanes of 32 bits */

// The header's `type`.
const bit<8> NICPS_TYPE_CALL = 1;     /* R1: who takes part? */
const bit<8> NICPS_TYPE_ANSWER = 2;   /* R2: I do */
const bit<8> NICPS_TYPE_FORMED = 3;   /* R3: the member list */
const bit<8> NICPS_TYPE_DECISION = 4; /* R5 to R7, R14: node 1 decides, all acknowledge */
const bit<8> NICPS_TYPE_ACK = 5;
const bit<8> NICPS_TYPE_TOKEN = 6;    /* R9, R10 */
const bit<8> NICPS_TYPE_FRAGMENT = 7; /* R10, R11 */
const bit<8> NICPS_TYPE_WANT = 8;     /* a member has become ready while the token is parked */
const bit<8> NICPS_TYPE_FAIL = 9;     /* a member cannot go on */

// The header's `flags`.
const bit<16> NICPS_FLAG_REPEAT = 1;        /* R16: sent before */
const bit<16> NICPS_FLAG_BOUNCED = 2;       /* handed on by the kernel */
const bit<16> NICPS_FLAG_PARKED = 4;        /* the owner keeps the token: nothing to do */
const bit<16> NICPS_FLAG_REPAIR = 8;        /* a fragment sent again on request */
const bit<16> NICPS_FLAG_TOKEN_WANTED = 16; /* WANT: hand me the token */

// The token's `state`: gradients may still come, or the list is closed.
const bit<8> NICPS_STATE_OPEN = 0;
const bit<8> NICPS_STATE_CLOSING = 1;

// A member's `marks` in the token, about the open round.
const bit<8> NICPS_MARK_CONTRIBUTED = 1;
const bit<8> NICPS_MARK_COMPLETE = 2;    /* has every fragment of the list */
const bit<8> NICPS_MARK_SKIPPED = 4;     /* had a gradient that does not fit the unit: asks for a larger one */

// What a decision starts: a series of rounds, except FINISH and STOP.
const bit<8> NICPS_PHASE_HANDOUT = 1; /* R5, R6: raw bytes of one member to all */
const bit<8> NICPS_PHASE_TRAIN = 2;   /* R8 to R13 */
const bit<8> NICPS_PHASE_TEST = 3;    /* R15: one round of two lanes, succeeded and failed */
const bit<8> NICPS_PHASE_FINISH = 4;  /* R14: save the model; the acknowledgement tells what there is to collect */
const bit<8> NICPS_PHASE_STOP = 5;    /* back to standby, after the end or because the job failed */

// Common to all frames of ours; follows the Ethernet header.
header nicps_header_t {
    bit<8> version;   /* format version, 1 */
    bit<8> type;      /* frame type */
    bit<16> flags;    /* flag mask */
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
}

// One member's line in the token; the k-th is that of member k.
header nicps_entry_t {
    bit<32> samples_before; /* samples counted in the round committed last */
    bit<32> samples;        /* samples counted in the open round */
    bit<32> ready;          /* samples worked so far, not yet sent */
    bit<32> read;           /* last round whose sum was read out */
    bit<8> marks;           /* mark mask */
    int<8> unit;            /* log2 of the unit wanted for the next round */
    bit<16> reserved;       /* 0 */
}

// Fragments that some member lacks; only their sender repairs.
header nicps_range_t {
    bit<32> first;  /* first missing fragment */
    bit<16> count;  /* how many in a row */
    bit<16> sender; /* member that sent them */
}

// R1: the starter asks who takes part. The tail is its name.
header nicps_call_t {
    bit<64> nonce; /* names this formation */
}

// R2: a host takes part. The tail is its name.
header nicps_answer_t {
    bit<64> nonce;    /* of the call */
    bit<32> view;     /* highest view this host has been in */
    bit<32> reserved; /* 0 */
}

// R3: the network is formed; the list is the truth. Acknowledged like a decision, as number 0.
header nicps_formed_t {
    bit<64> nonce;     /* of the call */
    bit<16> members;   /* entries that follow */
    bit<16> reserved;  /* 0 */
    bit<32> reserved2; /* 0 */
}

// One member of a list; the k-th is member k.
header nicps_formed_member_t {
    bit<48> mac;   /* MAC address */
    bit<112> name; /* host name, UTF-8, zero padded */
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

// A member has heard a decision (0: the list); once it is prepared, the tail may hold an answer as JSON.
header nicps_ack_t {
    bit<32> number;    /* of the decision */
    bit<8> prepared;   /* 1: prepared; 0: heard, still preparing */
    bit<8> reserved;   /* 0 */
    bit<16> reserved2; /* 0 */
}

// A member without the token tells what it has; with TOKEN_WANTED the holder of a parked one hands it over.
header nicps_want_t {
    bit<32> ready; /* samples worked so far in the round */
    bit<32> read;  /* last round whose sum was read out */
}

// A member cannot go on with the job; the tail says why, in one line.
header nicps_fail_t {
    bit<64> reserved; /* 0 */
}

#endif  // NICPS_WIRE_P4
