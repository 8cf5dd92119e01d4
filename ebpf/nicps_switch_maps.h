/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The maps of a Linux switch that adds, besides those of nicps_shared_maps.h,
 * and one access function for each. Read by its XDP program only.
 */
#ifndef NICPS_SWITCH_MAPS_H
#define NICPS_SWITCH_MAPS_H

#include "nicps_shared_maps.h"

BPF_F_TABLE("array", u32, struct nicps_switch_config, config, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_told, told, NICPS_TOLD_KINDS, BPF_F_MMAPABLE);

/* The ports to which sums are sent. */
BPF_DEVMAP(ports, NICPS_PORTS);

/* A page, fifty records. */
BPF_RINGBUF_OUTPUT(doorbell, 1);

/* As large as the vectors: see nicps_maps.h. */
BPF_F_TABLE("array", u32, struct nicps_place, places_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, struct nicps_block, blocks_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, struct nicps_lanes, sums_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_ARRAY_OF_MAPS(places, "places_shape", 1);
BPF_ARRAY_OF_MAPS(blocks, "blocks_shape", 1);
BPF_ARRAY_OF_MAPS(sums, "sums_shape", 1);

static __always_inline struct nicps_switch_config *nicps_switch_config(void)
{
	u32 key = 0;

	return config.lookup(&key);
}

static __always_inline struct nicps_told *nicps_told(u32 kind)
{
	return told.lookup(&kind);
}

/* One of a fragment's two places: `at` is 0 or 1. */
static __always_inline struct nicps_place *nicps_place(u32 index, u32 at)
{
	u32 key = 0, place = index * NICPS_PLACES + at;
	void *inner = places.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &place) : NULL;
}

/* The sum that was made in that place. */
static __always_inline struct nicps_lanes *nicps_lanes(u32 index, u32 at)
{
	u32 key = 0, place = index * NICPS_PLACES + at;
	void *inner = sums.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &place) : NULL;
}

/* The block with that place's accumulators; a fragment's two are not in one block. */
static __always_inline struct nicps_block *nicps_place_block(u32 block, u32 at)
{
	u32 key = 0, place = block * NICPS_PLACES + at;
	void *inner = blocks.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &place) : NULL;
}

/* 0, or the error code if there is no room. */
static __always_inline long nicps_wake(struct nicps_message *message)
{
	return doorbell.ringbuf_output(message, sizeof(*message), BPF_RB_FORCE_WAKEUP);
}

static __always_inline int nicps_send_to_ports(void)
{
	return ports.redirect_map(0, BPF_F_BROADCAST);
}

#endif /* NICPS_SWITCH_MAPS_H */
