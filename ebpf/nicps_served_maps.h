/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The maps of parameter servers, besides those of nicps_maps.h, and one access
 * function for each. Read by the program of servers only.
 */
#ifndef NICPS_SERVED_MAPS_H
#define NICPS_SERVED_MAPS_H

#include "nicps_maps.h"

/* Of servers, by member: at a server each worker's push, at a worker each server's answers. */
BPF_F_TABLE("array", u32, struct nicps_pusher, pushers, NICPS_SENDERS, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_answered, answered, NICPS_SENDERS,
	    BPF_F_MMAPABLE);

/* As large as a job's vectors, as those of nicps_maps.h. */
BPF_F_TABLE("array", u32, struct nicps_home, homes_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, u64, taken_shape, 1, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_ARRAY_OF_MAPS(homes, "homes_shape", 1);
BPF_ARRAY_OF_MAPS(parameters, "blocks_shape", 1);
BPF_ARRAY_OF_MAPS(taken, "taken_shape", 1);

static __always_inline struct nicps_home *nicps_home(u32 index)
{
	u32 key = 0;
	void *inner = homes.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_block *nicps_parameters(u32 index)
{
	u32 key = 0;
	void *inner = parameters.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

/* The number of this worker's newest step of which the server has acknowledged that fragment. */
static __always_inline u64 *nicps_taken(u32 index)
{
	u32 key = 0;
	void *inner = taken.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_pusher *nicps_pusher(u32 worker)
{
	return pushers.lookup(&worker);
}

static __always_inline struct nicps_answered *nicps_answered(u32 server)
{
	return answered.lookup(&server);
}

#endif /* NICPS_SERVED_MAPS_H */
