// SPDX-License-Identifier: Apache-2.0
// The switch's values of a frame while it handles it, and the reasons for which frames are
// refused. nicps/switch reads sizes and names from the text of this file.
#ifndef NICPS_STATE_P4
#define NICPS_STATE_P4

typedef bit<9> port_t;
typedef bit<48> mac_t;

#define NICPS_FLOOD 1          /* multicast group: all ports */
#define NICPS_FLOOD_AND_TELL 2 /* all ports, and the controller's */
#define NICPS_TELL 3           /* replication number of the controller's copy */
#define NICPS_MAC_SLOTS 4096   /* of the learnt MAC addresses */
#define NICPS_PRIORITIES 8     /* in 802.1p tags */

const bit<16> NICPS_TAGGED = 0x8100; /* EtherType of a frame with a tag */
const bit<16> NICPS_TAG_BYTES = 4;

// Sums that the switch has room for, a power of two: two quanta. With less room
// it takes no fragment before all have the sum whose slot it needs.
#ifndef NICPS_SLOTS
#define NICPS_SLOTS 512
#endif

// The outcomes of frames; the numbers are places in the counter `frames`.
#define NICPS_COUNT_SWITCHED 0  /* not ours, or of another network */
#define NICPS_COUNT_CONTROL 1   /* ours, neither token nor fragment */
#define NICPS_COUNT_TOKEN 2     /* a member's token, passed on */
#define NICPS_COUNT_FRAGMENT 3  /* the holder's fragment, passed on */
#define NICPS_COUNT_TRUNCATED 4 /* shorter than its length field, or than its type */
#define NICPS_COUNT_VERSION 5   /* another version of the format */
#define NICPS_COUNT_TYPE 6      /* unknown type */
#define NICPS_COUNT_STRANGER 7  /* R4: not this member's MAC address and port */
#define NICPS_COUNT_VIEW 8      /* another view than the token's */
#define NICPS_COUNT_STALE 9     /* token not newer than the last one seen */
#define NICPS_COUNT_HOLDER 10   /* R10: fragment for hosts, of a member that does not have the token */
#define NICPS_COUNT_MALFORMED 11 /* fields that are not valid */
#define NICPS_COUNT_ADDED 12    /* fragment added to its sum, which still lacks others */
#define NICPS_COUNT_SUMMED 13   /* fragment that its sum lacked: the sum went to all */
#define NICPS_COUNT_ANSWERED 14 /* the sum, once more, to a member that lacks it */
#define NICPS_COUNT_DUPLICATE 15 /* fragment that is in its sum already */
#define NICPS_COUNT_UNLISTED 16 /* fragment of a member that is not in the round's list */
#define NICPS_COUNT_ROUND 17    /* of another round than the token's, or before its list is closed */
#define NICPS_COUNT_SHIFT 18    /* another shift than the round's, which is 0 */
#define NICPS_COUNT_WINDOW 19   /* a sum that all have, or that there is no room for yet */
#define NICPS_COUNT_STRIPE 20   /* a member's frame of stripes, passed on */
#define NICPS_COUNT_SERVER 21   /* a member's frame of parameter servers, passed on */
#define NICPS_COUNTERS 22

header ethernet_t {
    mac_t destination;
    mac_t source;
    bit<16> ethertype;
}

// 802.1Q: `network` is the virtual network's number, 0 for none.
header tag_t {
    bit<3> priority;
    bit<1> drop_eligible;
    bit<12> network;
    bit<16> ethertype;
}

header payload_t {
    wide_t a;
    wide_t b;
    wide_t c;
    wide_t d;
    wide_t e;
    rest_t f;
}

struct headers_t {
    ethernet_t ethernet;
    tag_t tag;
    nicps_header_t nicps;
    nicps_token_t token;
    nicps_fragment_t fragment;
    payload_t payload;
    nicps_view_t view;
}

// The newest token, as far as fragments depend on it.
struct token_state_t {
    bit<32> view;
    bit<64> position;     /* generation << 32 | hop */
    bit<16> owner;
    bit<32> round;
    bit<64> listed;       /* of the closed list; bit k - 1 is member k; 0 while it is open */
    bit<32> settled;      /* sums that all have */
}

struct metadata_t {
    bool ours;            /* of the network that this switch serves */
    bool refused;
    bit<32> reason;       /* of the counter `frames` */
    bool sum;             /* the frame goes out as a sum: to all, or to the member that asked */
    bool asked;
}

#endif  // NICPS_STATE_P4
