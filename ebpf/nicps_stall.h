/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The places where a processor that stalls meets what others have done since.
 * Tests stop it there (tests/xdp/stall.c); in the program they are nothing.
 */
#ifndef NICPS_STALL
#define NICPS_STALL(place)
#endif
