// SPDX-License-Identifier: Apache-2.0
// A flooded frame does not go back to where it came from.

control NicpsEgress(inout headers_t headers, inout metadata_t meta,
                    inout standard_metadata_t standard) {
    apply {
        if (standard.egress_port == standard.ingress_port) {
            mark_to_drop(standard);
        }
    }
}
