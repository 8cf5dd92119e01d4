// SPDX-License-Identifier: Apache-2.0
// Adding mode: a fragment is added to the sum in its slot, once for each member
// of the round's closed list; with the last of them the sum goes to all. Members
// send at the same time. A slot keeps its sum until all have it: a member that sends
// a fragment of a whole sum again gets the sum. A member outside the list may only
// ask.
//
// All have it once a fragment that is two quanta further on comes, since a
// member is at most one quantum ahead of its sums, and, where some members are
// not in the list, two ahead of those that the token says all have.

control Adding(inout headers_t headers, inout metadata_t meta, in token_state_t newest) {
    register<bit<96>>(NICPS_SLOTS) slot_tag; /* view, round, index */
    register<bit<64>>(NICPS_SLOTS) slot_seen; /* bit k - 1: member k's fragment is in it */
    Lanes() lanes;

    apply {
        bit<32> slot = headers.fragment.index & (NICPS_SLOTS - 1);
        bit<96> its = headers.nicps.view ++ headers.nicps.round ++ headers.fragment.index;
        bit<64> member = (bit<64>)1 << (bit<8>)(headers.nicps.sender - 1);
        bit<96> tag;
        bit<64> seen;
        bool room = (bit<32>)NICPS_SLOTS >> 1 >= (bit<32>)NICPS_QUANTUM;
        bool adds = false;
        bool first = false;

        meta.refused = true;
        if (!headers.payload.isValid() ||
            headers.nicps.length != NICPS_FRAGMENT_HEADER_BYTES + NICPS_PAYLOAD_BYTES) {
            meta.reason = NICPS_COUNT_TRUNCATED;
        } else if ((headers.fragment.width != 32 && headers.fragment.width != 16 &&
                    headers.fragment.width != 8) ||
                   headers.fragment.index >= headers.fragment.fragments) {
            meta.reason = NICPS_COUNT_MALFORMED;
        } else if (headers.nicps.round != newest.round || newest.listed == 0) {
            meta.reason = NICPS_COUNT_ROUND;
        } else if (headers.fragment.shift != 0) {
            meta.reason = NICPS_COUNT_SHIFT;
        } else if (headers.fragment.index < newest.settled ||
                   (!room && headers.fragment.index - newest.settled >= NICPS_SLOTS)) {
            meta.reason = NICPS_COUNT_WINDOW;
        } else {
            slot_tag.read(tag, slot);
            slot_seen.read(seen, slot);
            if (tag != its) {
                seen = 0;
            }
            if (tag[95:32] == its[95:32] && tag[31:0] > its[31:0]) {
                meta.reason = NICPS_COUNT_WINDOW;
            } else if (seen == newest.listed) {
                meta.reason = NICPS_COUNT_ANSWERED;
                meta.sum = true;
                meta.asked = true;
            } else if ((member & newest.listed) == 0) {
                meta.reason = NICPS_COUNT_UNLISTED;
            } else if ((member & seen) != 0) {
                meta.reason = NICPS_COUNT_DUPLICATE;
            } else {
                adds = true;
                first = seen == 0;
                seen = seen | member;
                slot_tag.write(slot, its);
                slot_seen.write(slot, seen);
                meta.reason = NICPS_COUNT_ADDED;
                if (seen == newest.listed) {
                    meta.reason = NICPS_COUNT_SUMMED;
                    meta.sum = true;
                }
            }
        }
        if (adds || meta.asked) {
            lanes.apply(headers, slot, adds, first);
        }
        if (meta.sum) {
            meta.refused = false;
            headers.ethernet.source = NICPS_SWITCH;
            headers.nicps.sender = 0;
            headers.nicps.tag = 0;
        }
    }
}
