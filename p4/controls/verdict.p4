// SPDX-License-Identifier: Apache-2.0
// The outcome of a frame is counted by reason, once.

control Verdict(inout metadata_t meta, inout standard_metadata_t standard) {
    counter(NICPS_COUNTERS, CounterType.packets) frames;

    apply {
        frames.count(meta.reason);
        if (meta.refused) {
            mark_to_drop(standard);
        }
    }
}
