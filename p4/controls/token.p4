// SPDX-License-Identifier: Apache-2.0
// The token as it passes: the newest one says which view is in force and who
// may broadcast (R10). Nobody has to tell the switch of a new view.

control Token(in headers_t headers, inout metadata_t meta) {
    register<bit<32>>(1) token_view;
    register<bit<64>>(1) token_position; /* generation << 32 | hop */
    register<bit<16>>(1) token_owner;

    apply {
        bit<32> view;
        bit<64> position;
        bit<16> owner;
        bit<64> its = headers.token.generation ++ headers.token.hop;
        bit<32> length = (bit<32>)NICPS_TOKEN_HEADER_BYTES +
                         20 * (bit<32>)headers.token.members +
                         8 * (bit<32>)headers.token.ranges;

        token_view.read(view, 0);
        token_position.read(position, 0);
        token_owner.read(owner, 0);
        if (headers.token.isValid()) {
            if ((bit<32>)headers.nicps.length != length || headers.token.owner == 0 ||
                headers.token.owner > (bit<16>)headers.token.members) {
                meta.refused = true;
                meta.reason = NICPS_COUNT_MALFORMED;
            } else if (headers.nicps.view < view) {
                meta.refused = true;
                meta.reason = NICPS_COUNT_VIEW;
            } else if (headers.nicps.view == view && its <= position) {
                meta.refused = (headers.nicps.flags & NICPS_FLAG_REPEAT) == 0;
                meta.reason = meta.refused ? (bit<32>)NICPS_COUNT_STALE : NICPS_COUNT_TOKEN;
            } else {
                token_view.write(0, headers.nicps.view);
                token_position.write(0, its);
                token_owner.write(0, headers.token.owner);
                meta.reason = NICPS_COUNT_TOKEN;
            }
        } else if (headers.nicps.view != view) {
            meta.refused = true;
            meta.reason = NICPS_COUNT_VIEW;
        } else if (headers.nicps.sender != owner) {
            meta.refused = true;
            meta.reason = NICPS_COUNT_HOLDER;
        } else {
            meta.reason = NICPS_COUNT_FRAGMENT;
        }
    }
}
