// SPDX-License-Identifier: Apache-2.0
// The sums themselves: 1,440 bytes a slot, in six registers.

// With constants for the width: p4c folds them, and half of the work is saved.
#define NICPS_ADD_PAYLOAD(width)                                                \
    headers.payload.a = NICPS_ADD(a, headers.payload.a, NICPS_TOP_##width);     \
    headers.payload.b = NICPS_ADD(b, headers.payload.b, NICPS_TOP_##width);     \
    headers.payload.c = NICPS_ADD(c, headers.payload.c, NICPS_TOP_##width);     \
    headers.payload.d = NICPS_ADD(d, headers.payload.d, NICPS_TOP_##width);     \
    headers.payload.e = NICPS_ADD(e, headers.payload.e, NICPS_TOP_##width);     \
    headers.payload.f = NICPS_ADD(f, headers.payload.f, NICPS_TOP_##width##_OF_REST);

control Lanes(inout headers_t headers, in bit<32> slot, in bool adds, in bool first) {
    register<wide_t>(NICPS_SLOTS) sums_a;
    register<wide_t>(NICPS_SLOTS) sums_b;
    register<wide_t>(NICPS_SLOTS) sums_c;
    register<wide_t>(NICPS_SLOTS) sums_d;
    register<wide_t>(NICPS_SLOTS) sums_e;
    register<rest_t>(NICPS_SLOTS) sums_f;

    apply {
        wide_t a;
        wide_t b;
        wide_t c;
        wide_t d;
        wide_t e;
        rest_t f;

        if (!first) {
            sums_a.read(a, slot);
            sums_b.read(b, slot);
            sums_c.read(c, slot);
            sums_d.read(d, slot);
            sums_e.read(e, slot);
            sums_f.read(f, slot);
            if (!adds) {
                headers.payload.a = a;
                headers.payload.b = b;
                headers.payload.c = c;
                headers.payload.d = d;
                headers.payload.e = e;
                headers.payload.f = f;
            } else if (headers.fragment.width == 32) {
                NICPS_ADD_PAYLOAD(32)
            } else if (headers.fragment.width == 16) {
                NICPS_ADD_PAYLOAD(16)
            } else {
                NICPS_ADD_PAYLOAD(8)
            }
        }
        if (adds) {
            sums_a.write(slot, headers.payload.a);
            sums_b.write(slot, headers.payload.b);
            sums_c.write(slot, headers.payload.c);
            sums_d.write(slot, headers.payload.d);
            sums_e.write(slot, headers.payload.e);
            sums_f.write(slot, headers.payload.f);
        }
    }
}
