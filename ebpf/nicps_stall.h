/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The places in which a processor that stalls meets changes of other
 * processors. Tests stop it there (tests/xdp/stall.c); in the program they are
 * empty.
 */
#ifndef NICPS_STALL
#define NICPS_STALL(place)
#endif
