/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The maps of a host's programs, besides those of nicps_shared_maps.h, and one
 * access function for each. Read by the XDP and the TC program only.
 */
#ifndef NICPS_MAPS_H
#define NICPS_MAPS_H

#include "nicps_shared_maps.h"

BPF_F_TABLE("array", u32, struct nicps_config, config, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_limit, limits, NICPS_OTHERS + 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_train, train, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_ring, ring, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_saved, bounced_frame, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_progress, progress, NICPS_BANKS *NICPS_SENDERS,
	    BPF_F_MMAPABLE);

/*
 * The next fragment that this member sends, by bank and aggregator, as round <<
 * 32 | index of the fragment in that stripe.
 */
BPF_F_TABLE("array", u32, u64, sent, NICPS_BANKS *NICPS_SENDERS, BPF_F_MMAPABLE);

/* A page, a hundred records. */
BPF_RINGBUF_OUTPUT(doorbell, 1);

/*
 * Maps as large as a job's vectors: the agent makes them and puts them in here.
 * The inner maps only show the verifier their shape.
 */
BPF_F_TABLE("array", u32, struct nicps_slot, slots_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, struct nicps_block, blocks_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, struct nicps_gather, gathers_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, struct nicps_stored, sums_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_F_TABLE("array", u32, struct nicps_own, own_shape, 1,
	    BPF_F_MMAPABLE | BPF_F_INNER_MAP);
BPF_ARRAY_OF_MAPS(gathers, "gathers_shape", 1);
BPF_ARRAY_OF_MAPS(gather_blocks, "blocks_shape", 1);
BPF_ARRAY_OF_MAPS(sums, "sums_shape", 1);
BPF_ARRAY_OF_MAPS(own, "own_shape", 1);
BPF_ARRAY_OF_MAPS(slots, "slots_shape", 1);
BPF_ARRAY_OF_MAPS(accumulators, "blocks_shape", 1);

static __always_inline struct nicps_config *nicps_config(void)
{
	u32 key = 0;

	return config.lookup(&key);
}

static __always_inline struct nicps_limit *nicps_limit(u32 which)
{
	return limits.lookup(&which);
}

static __always_inline struct nicps_train *nicps_train(void)
{
	u32 key = 0;

	return train.lookup(&key);
}

static __always_inline struct nicps_ring *nicps_ring(void)
{
	u32 key = 0;

	return ring.lookup(&key);
}

static __always_inline struct nicps_saved *nicps_saved(void)
{
	u32 key = 0;

	return bounced_frame.lookup(&key);
}

static __always_inline struct nicps_progress *nicps_progress(u32 bank, u32 sender)
{
	u32 key = bank * NICPS_SENDERS + sender;

	return progress.lookup(&key);
}

static __always_inline u64 *nicps_sent(u32 bank, u32 aggregator)
{
	u32 key = bank * NICPS_SENDERS + aggregator;

	return sent.lookup(&key);
}

static __always_inline struct nicps_slot *nicps_slot(u32 index)
{
	u32 key = 0;
	void *inner = slots.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_block *nicps_block(u32 index)
{
	u32 key = 0;
	void *inner = accumulators.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_gather *nicps_gather(u32 index)
{
	u32 key = 0;
	void *inner = gathers.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_block *nicps_gather_block(u32 index)
{
	u32 key = 0;
	void *inner = gather_blocks.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_stored *nicps_stored(u32 index)
{
	u32 key = 0;
	void *inner = sums.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

static __always_inline struct nicps_own *nicps_own(u32 index)
{
	u32 key = 0;
	void *inner = own.lookup(&key);

	return inner ? bpf_map_lookup_elem(inner, &index) : NULL;
}

/* 0, or the error code if there is no room. */
static __always_inline long nicps_wake(struct nicps_bell *bell)
{
	return doorbell.ringbuf_output(bell, sizeof(*bell), BPF_RB_FORCE_WAKEUP);
}

#endif /* NICPS_MAPS_H */
