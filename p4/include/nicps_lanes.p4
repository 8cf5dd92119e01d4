// SPDX-License-Identifier: Apache-2.0
// The top bit of every lane of a payload, for lanes of 32, 16 and 8 bits.
#ifndef NICPS_LANES_P4
#define NICPS_LANES_P4

// 360 words of 32 bits, as wide as p4c's fields go.
typedef bit<2048> wide_t;
typedef bit<1280> rest_t;

#define NICPS_TOPS(width, word)                                         \
    const bit<256> NICPS_TOP_##width##_OF_256 =                         \
        word ++ word ++ word ++ word ++ word ++ word ++ word ++ word;   \
    const bit<1024> NICPS_TOP_##width##_OF_1024 =                       \
        NICPS_TOP_##width##_OF_256 ++ NICPS_TOP_##width##_OF_256 ++     \
        NICPS_TOP_##width##_OF_256 ++ NICPS_TOP_##width##_OF_256;       \
    const wide_t NICPS_TOP_##width =                                    \
        NICPS_TOP_##width##_OF_1024 ++ NICPS_TOP_##width##_OF_1024;     \
    const rest_t NICPS_TOP_##width##_OF_REST =                          \
        NICPS_TOP_##width##_OF_1024 ++ NICPS_TOP_##width##_OF_256;

NICPS_TOPS(32, 32w0x80000000)
NICPS_TOPS(16, 32w0x80008000)
NICPS_TOPS(8, 32w0x80808080)

// Lanes side by side, added all at once: without their top bits, so that
// nothing is carried into the next lane; the top bits, by exclusive or.
#define NICPS_ADD(sum, more, top) \
    ((((sum) & ~(top)) + ((more) & ~(top))) ^ (((sum) ^ (more)) & (top)))

#endif  // NICPS_LANES_P4
