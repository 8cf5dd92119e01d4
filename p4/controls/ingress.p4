// SPDX-License-Identifier: Apache-2.0
// The verdict on a frame. In ring mode the switch forwards the frames that the hosts
// would accept, and they add, each for itself, or in stripes and as servers for each
// other; fragments with the flag ADD it adds itself. The priority in a frame's tag says
// which queue it waits in, and nothing else.

control NicpsIngress(inout headers_t headers, inout metadata_t meta,
                     inout standard_metadata_t standard) {
    Members() members;
    Token() token;
    Adding() adding;
    Priority() priority;
    Forwarding() forwarding;
    Verdict() verdict;

    action serve() {
        meta.ours = true;
    }

    action ignore() {
        meta.ours = false;
    }

    table networks {
        key = {
            headers.nicps.network: exact;
        }
        actions = {
            serve;
            ignore;
        }
        const default_action = ignore;
        size = 1;
    }

    apply {
        bool known;
        bool stripe;
        bool server;
        bit<16> ethertype = headers.ethernet.ethertype;
        token_state_t newest;
        bit<32> arrived = standard.packet_length - (bit<32>)NICPS_ETHERNET_BYTES;

        meta.ours = false;
        meta.refused = false;
        meta.sum = false;
        meta.asked = false;
        meta.reason = NICPS_COUNT_SWITCHED;
        if (headers.tag.isValid() && headers.tag.network == 0) {
            ethertype = headers.tag.ethertype;
            arrived = arrived - (bit<32>)NICPS_TAG_BYTES;
        }
        if (headers.ethernet.isValid() && ethertype == NICPS_ETHERTYPE) {
            meta.refused = true;
            if (!headers.nicps.isValid()) {
                meta.reason = NICPS_COUNT_TRUNCATED;
            } else if (headers.nicps.version != NICPS_VERSION) {
                meta.reason = NICPS_COUNT_VERSION;
            } else if (headers.nicps.length < NICPS_HEADER_BYTES ||
                       (bit<32>)headers.nicps.length > arrived) {
                meta.reason = NICPS_COUNT_TRUNCATED;
            } else {
                meta.refused = false;
                networks.apply();
            }
        }
        if (meta.ours) {
            meta.reason = NICPS_COUNT_CONTROL;
            stripe = headers.nicps.type == NICPS_TYPE_CONTRIBUTION ||
                     headers.nicps.type == NICPS_TYPE_SUM ||
                     headers.nicps.type == NICPS_TYPE_ASK ||
                     headers.nicps.type == NICPS_TYPE_LACKING;
            server = headers.nicps.type >= NICPS_TYPE_PUSH &&
                     headers.nicps.type <= NICPS_TYPE_SETTLE;
            if (headers.nicps.type == 0 || headers.nicps.type > NICPS_TYPE_SETTLE) {
                meta.refused = true;
                meta.reason = NICPS_COUNT_TYPE;
            } else if (stripe || server || headers.nicps.type == NICPS_TYPE_TOKEN ||
                       headers.nicps.type == NICPS_TYPE_FRAGMENT) {
                members.apply(headers, standard, known);
                if (!known || (headers.nicps.sender == 0 && !stripe)) {
                    meta.refused = true;
                    meta.reason = NICPS_COUNT_STRANGER;
                } else if (!stripe && !server && !headers.token.isValid() &&
                           !headers.fragment.isValid()) {
                    meta.refused = true;
                    meta.reason = NICPS_COUNT_TRUNCATED;
                } else {
                    token.apply(headers, meta, newest);
                    if (headers.fragment.isValid() && !meta.refused &&
                        (headers.nicps.flags & NICPS_FLAG_ADD) != 0) {
                        adding.apply(headers, meta, newest);
                    }
                }
            }
        }
        if (meta.refused) {
            /* The frame goes no further, and nothing is learnt from it. */
        } else if (!meta.sum) {
            forwarding.apply(headers, meta, standard);
        } else if (meta.asked) {
            standard.egress_spec = standard.ingress_port;
        } else {
            standard.mcast_grp = NICPS_FLOOD;
        }
        priority.apply(headers, standard);
        verdict.apply(meta, standard);
    }
}
