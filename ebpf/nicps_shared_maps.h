/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The maps that the programs of a host and of a Linux switch both have, each
 * its own, and one access function for each. All code that needs BCC is in this
 * file and the two others of maps: another loader needs other versions of these
 * files and of no others. Read by BPF programs.
 */
#ifndef NICPS_SHARED_MAPS_H
#define NICPS_SHARED_MAPS_H

#include "nicps_shared.h"

BPF_F_TABLE("array", u32, struct nicps_key, view_key, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_outgoing, outgoing, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_window, windows, NICPS_CHANNELS *NICPS_SENDERS,
	    BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_member, members, NICPS_SENDERS, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, u64, counters, NICPS_COUNTERS, BPF_F_MMAPABLE);

static __always_inline struct nicps_key *nicps_key(void)
{
	u32 key = 0;

	return view_key.lookup(&key);
}

static __always_inline struct nicps_outgoing *nicps_outgoing(void)
{
	u32 key = 0;

	return outgoing.lookup(&key);
}

static __always_inline struct nicps_window *nicps_window(u32 channel, u32 sender)
{
	u32 key = channel * NICPS_SENDERS + sender;

	return windows.lookup(&key);
}

static __always_inline struct nicps_member *nicps_member(u32 number)
{
	return members.lookup(&number);
}

static __always_inline void nicps_count(u32 reason)
{
	u64 *count = counters.lookup(&reason);

	if (count)
		__sync_fetch_and_add(count, 1);
}

static __always_inline int nicps_drop(u32 reason)
{
	nicps_count(reason);
	return XDP_DROP;
}

#endif /* NICPS_SHARED_MAPS_H */
