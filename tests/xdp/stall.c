// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The XDP program of a host, in which a processor stalls. */
#include "stall.h"
#include "nicps.c"
