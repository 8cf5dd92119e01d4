// SPDX-License-Identifier: Apache-2.0
// R4: tokens and fragments only of recorded members, each at its own port. The
// controller records them from the lists that the hosts put in force. Number 0 is
// a Linux switch that adds, at the port that the controller was given.

control Members(in headers_t headers, in standard_metadata_t standard, out bool known) {
    action member() {
        known = true;
    }

    action stranger() {
        known = false;
    }

    table members {
        key = {
            headers.nicps.sender: exact;
            headers.ethernet.source: exact;
            standard.ingress_port: exact;
        }
        actions = {
            member;
            stranger;
        }
        const default_action = stranger;
        size = NICPS_MAX_MEMBERS + 1;
    }

    apply {
        known = false;
        members.apply();
    }
}
