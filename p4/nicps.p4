// SPDX-License-Identifier: Apache-2.0
// nicps on a switch (v1model, `simple_switch`): the work of the XDP program of a
// host, done once for all of them. Frames that are not ours are switched as on
// any learning switch. Run by `nicps switch p4`; docs/switch.md.
#include <core.p4>
#include <v1model.p4>

#include "include/nicps_wire.p4"
#include "include/nicps_lanes.p4"
#include "include/nicps_state.p4"
#include "controls/parser.p4"
#include "controls/verdict.p4"
#include "controls/forwarding.p4"
#include "controls/members.p4"
#include "controls/priority.p4"
#include "controls/token.p4"
#include "controls/lanes.p4"
#include "controls/adding.p4"
#include "controls/ingress.p4"
#include "controls/egress.p4"
#include "controls/deparser.p4"
#include "controls/verify_checksum.p4"
#include "controls/compute_checksum.p4"

V1Switch(NicpsParser(), NicpsVerifyChecksum(), NicpsIngress(), NicpsEgress(),
         NicpsComputeChecksum(), NicpsDeparser()) main;
