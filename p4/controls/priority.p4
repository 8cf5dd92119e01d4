// SPDX-License-Identifier: Apache-2.0
// The queue of an egress port that a frame waits in, by the priority in its 802.1p tag;
// without a tag that is 0. The controller fills the table, as it knows how many queues a
// port has (`simple_switch --priority-queues`); without entries all frames wait in one.

control Priority(in headers_t headers, inout standard_metadata_t standard) {
    bit<3> priority;

    action wait_in(bit<3> queue) {
        standard.priority = queue;
    }

    action wait() {
        standard.priority = 0;
    }

    table queues {
        key = {
            priority: exact;
        }
        actions = {
            wait_in;
            wait;
        }
        const default_action = wait;
        size = NICPS_PRIORITIES;
    }

    apply {
        priority = 0;
        if (headers.tag.isValid()) {
            priority = headers.tag.priority;
        }
        queues.apply();
    }
}
