// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The XDP program of a Linux switch, in which a processor stalls. */
#include "stall.h"
#include "nicps_switch.c"
