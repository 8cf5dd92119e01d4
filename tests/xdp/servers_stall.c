// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The program of parameter servers, in which a processor stalls. */
#include "stall.h"
#include "nicps_servers.c"
