// SPDX-License-Identifier: Apache-2.0
// A learning switch: a source's port is kept in the slot that its MAC address
// hashes to; frames to unknown and group addresses are flooded.

control Forwarding(in headers_t headers, in metadata_t meta,
                   inout standard_metadata_t standard) {
    register<bit<48>>(NICPS_MAC_SLOTS) learnt_macs;
    register<bit<9>>(NICPS_MAC_SLOTS) learnt_ports;

    apply {
        bit<32> slot;
        mac_t mac;
        port_t port;
        bool group_source = (headers.ethernet.source & 0x010000000000) != 0;
        bool group = (headers.ethernet.destination & 0x010000000000) != 0;

        if (!group_source) {
            hash(slot, HashAlgorithm.crc32, 32w0, { headers.ethernet.source },
                 (bit<32>)NICPS_MAC_SLOTS);
            learnt_macs.write(slot, headers.ethernet.source);
            learnt_ports.write(slot, standard.ingress_port);
        }
        hash(slot, HashAlgorithm.crc32, 32w0, { headers.ethernet.destination },
             (bit<32>)NICPS_MAC_SLOTS);
        learnt_macs.read(mac, slot);
        learnt_ports.read(port, slot);
        if (!group && mac == headers.ethernet.destination) {
            standard.egress_spec = port;
        } else if (headers.view.isValid() && headers.view.step == NICPS_STEP_INSTALL) {
            standard.mcast_grp = NICPS_FLOOD_AND_TELL;
        } else {
            standard.mcast_grp = NICPS_FLOOD;
        }
    }
}
