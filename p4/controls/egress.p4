// SPDX-License-Identifier: Apache-2.0
// A flooded frame does not go back to its ingress port; a sum does. In the
// controller's copy the destination is the port that the frame came in at.

control NicpsEgress(inout headers_t headers, inout metadata_t meta,
                    inout standard_metadata_t standard) {
    apply {
        if (standard.egress_rid == NICPS_TELL) {
            headers.ethernet.destination = (mac_t)(bit<48>)standard.ingress_port;
        } else if (standard.egress_port == standard.ingress_port && !meta.sum) {
            mark_to_drop(standard);
        }
    }
}
