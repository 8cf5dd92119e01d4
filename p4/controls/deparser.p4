// SPDX-License-Identifier: Apache-2.0
// A frame leaves in the form in which it came.

control NicpsDeparser(packet_out packet, in headers_t headers) {
    apply {
        packet.emit(headers);
    }
}
