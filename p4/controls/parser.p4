// SPDX-License-Identifier: Apache-2.0
// Parses our frames as far as a verdict needs; of all others the Ethernet header, and an
// 802.1p tag behind it. A frame with a tag is ours if the tag is of no virtual network.

parser NicpsParser(packet_in packet, out headers_t headers, inout metadata_t meta,
                   inout standard_metadata_t standard) {
    state start {
        packet.extract(headers.ethernet);
        transition select(headers.ethernet.ethertype) {
            NICPS_ETHERTYPE: ours;
            NICPS_TAGGED: tag;
            default: accept;
        }
    }

    state tag {
        packet.extract(headers.tag);
        transition select(headers.tag.network, headers.tag.ethertype) {
            (0, NICPS_ETHERTYPE): ours;
            default: accept;
        }
    }

    state ours {
        packet.extract(headers.nicps);
        transition select(headers.nicps.type) {
            NICPS_TYPE_TOKEN: token;
            NICPS_TYPE_FRAGMENT: fragment;
            NICPS_TYPE_VIEW: view;
            default: accept;
        }
    }

    state token {
        packet.extract(headers.token);
        transition accept;
    }

    state fragment {
        packet.extract(headers.fragment);
        transition select(headers.nicps.flags & NICPS_FLAG_ADD) {
            NICPS_FLAG_ADD: payload;
            default: accept;
        }
    }

    state payload {
        packet.extract(headers.payload);
        transition accept;
    }

    state view {
        packet.extract(headers.view);
        transition accept;
    }
}
