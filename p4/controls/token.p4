// SPDX-License-Identifier: Apache-2.0
// The token as it passes: the newest one tells which view is in force, who may
// broadcast (R10), and whose gradients are to be added. So the switch learns of a
// new view or round by itself. Frames of stripes and of servers, and fragments that the
// switch adds, may be sent by all members at once.

control Token(in headers_t headers, inout metadata_t meta, out token_state_t newest) {
    /* Of two words each, the high one first: the run-time API reads 63 bits. */
    register<bit<32>>(2) token_position; /* generation, hop */
    register<bit<32>>(2) token_listed;
    register<bit<32>>(1) token_view;
    register<bit<16>>(1) token_owner;
    register<bit<32>>(1) token_round;
    register<bit<32>>(1) token_settled;

    apply {
        bit<32> high;
        bit<32> low;
        bit<64> its = headers.token.generation ++ headers.token.hop;
        bit<32> length = (bit<32>)NICPS_TOKEN_HEADER_BYTES +
                         (bit<32>)NICPS_ENTRY_BYTES * (bit<32>)headers.token.members +
                         (bit<32>)NICPS_RANGE_BYTES * (bit<32>)headers.token.ranges;

        token_view.read(newest.view, 0);
        token_position.read(high, 0);
        token_position.read(low, 1);
        newest.position = high ++ low;
        token_owner.read(newest.owner, 0);
        token_round.read(newest.round, 0);
        token_listed.read(high, 0);
        token_listed.read(low, 1);
        newest.listed = high ++ low;
        token_settled.read(newest.settled, 0);
        if (headers.token.isValid()) {
            if ((bit<32>)headers.nicps.length != length || headers.token.owner == 0 ||
                headers.token.owner > (bit<16>)headers.token.members) {
                meta.refused = true;
                meta.reason = NICPS_COUNT_MALFORMED;
            } else if (headers.nicps.view < newest.view) {
                meta.refused = true;
                meta.reason = NICPS_COUNT_VIEW;
            } else if (headers.nicps.view == newest.view && its <= newest.position) {
                meta.refused = (headers.nicps.flags & NICPS_FLAG_REPEAT) == 0;
                meta.reason = meta.refused ? (bit<32>)NICPS_COUNT_STALE : NICPS_COUNT_TOKEN;
            } else {
                token_view.write(0, headers.nicps.view);
                token_position.write(0, headers.token.generation);
                token_position.write(1, headers.token.hop);
                token_owner.write(0, headers.token.owner);
                token_round.write(0, headers.nicps.round);
                token_settled.write(0, headers.token.settled);
                token_listed.write(0, headers.token.listed[63:32]);
                token_listed.write(1, headers.token.listed[31:0]);
                meta.reason = NICPS_COUNT_TOKEN;
            }
        } else if (headers.nicps.view != newest.view) {
            meta.refused = true;
            meta.reason = NICPS_COUNT_VIEW;
        } else if (!headers.fragment.isValid()) {
            meta.reason = headers.nicps.type >= NICPS_TYPE_PUSH
                              ? (bit<32>)NICPS_COUNT_SERVER : NICPS_COUNT_STRIPE;
        } else if ((headers.nicps.flags & NICPS_FLAG_ADD) == 0 &&
                   headers.nicps.sender != newest.owner) {
            meta.refused = true;
            meta.reason = NICPS_COUNT_HOLDER;
        } else {
            meta.reason = NICPS_COUNT_FRAGMENT;
        }
    }
}
