// SPDX-License-Identifier: Apache-2.0
// A frame goes out as it came in.

control NicpsDeparser(packet_out packet, in headers_t headers) {
    apply {
        packet.emit(headers);
    }
}
