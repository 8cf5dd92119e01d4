// SPDX-License-Identifier: Apache-2.0
// What the switch keeps of a frame while it handles it, and why frames are
// refused. nicps/switch/p4 reads sizes and names from the text of this file.
#ifndef NICPS_STATE_P4
#define NICPS_STATE_P4

typedef bit<9> port_t;
typedef bit<48> mac_t;

#define NICPS_FLOOD 1          /* multicast group: all ports */
#define NICPS_FLOOD_AND_TELL 2 /* all ports, and the controller's */
#define NICPS_MAC_SLOTS 4096   /* of the learnt MAC addresses */

// What became of a frame; the numbers are places in the counter `frames`.
#define NICPS_COUNT_SWITCHED 0  /* not ours, or of another network */
#define NICPS_COUNT_CONTROL 1   /* ours, neither token nor fragment */
#define NICPS_COUNT_TOKEN 2     /* a member's token, passed on */
#define NICPS_COUNT_FRAGMENT 3  /* the holder's fragment, passed on */
#define NICPS_COUNT_TRUNCATED 4 /* shorter than it says, or than its type */
#define NICPS_COUNT_VERSION 5   /* another version of the format */
#define NICPS_COUNT_TYPE 6      /* unknown type */
#define NICPS_COUNT_STRANGER 7  /* R4: not this member's MAC address and port */
#define NICPS_COUNT_VIEW 8      /* another view than the token's */
#define NICPS_COUNT_STALE 9     /* token not newer than the last one seen */
#define NICPS_COUNT_HOLDER 10   /* R10: fragment of somebody who has not got the token */
#define NICPS_COUNT_MALFORMED 11 /* fields that cannot be */
#define NICPS_COUNTERS 12

header ethernet_t {
    mac_t destination;
    mac_t source;
    bit<16> ethertype;
}

struct headers_t {
    ethernet_t ethernet;
    nicps_header_t nicps;
    nicps_token_t token;
    nicps_fragment_t fragment;
    nicps_view_t view;
}

struct metadata_t {
    bool ours;          /* of the network that this switch serves */
    bool refused;
    bit<32> reason;     /* of the counter `frames` */
}

#endif  // NICPS_STATE_P4
