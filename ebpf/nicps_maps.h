/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The maps of a host's programs, besides those of nicps_shared_maps.h, and one
 * access function for each. Read by the XDP and the TC program only.
 */
#ifndef NICPS_MAPS_H
#define NICPS_MAPS_H

#include "nicps_shared_maps.h"

BPF_F_TABLE("array", u32, struct nicps_config, config, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_limit, limits, NICPS_PROGRAM + 1,
	    BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_train, train, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_ring, ring, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_saved, bounced_frame, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_progress, progress, NICPS_BANKS *NICPS_COUNTS,
	    BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_token_window, token_windows, NICPS_SENDERS,
	    BPF_F_MMAPABLE);

/* Of stripes, by channel; what is sent also by bank and aggregator. */
BPF_F_TABLE("array", u32, struct nicps_channel, channels, NICPS_CHANNELS,
	    BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_sent, sent,
	    NICPS_CHANNELS *NICPS_BANKS *NICPS_SENDERS, BPF_F_MMAPABLE);

_Static_assert(NICPS_COUNTS == NICPS_SENDERS + NICPS_CHANNELS - 1,
	       "each channel above 0 has a row of counts behind those of the senders");

/* Direct calls: by channel and parity; numbers also by member and fragment. */
BPF_F_TABLE("array", u32, struct nicps_desk, desks, NICPS_CHANNELS *NICPS_BANKS,
	    BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct nicps_numbers_of, numbers,
	    NICPS_CHANNELS *NICPS_BANKS *NICPS_DESK_MEMBERS *NICPS_DESK_FRAGMENTS,
	    BPF_F_MMAPABLE);

/* A page, a hundred records. */
BPF_RINGBUF_OUTPUT(doorbell, 1);

/* By channel: they wake the program's thread. */
BPF_RINGBUF_OUTPUT(call_bell_0, 1);
BPF_RINGBUF_OUTPUT(call_bell_1, 1);
BPF_RINGBUF_OUTPUT(call_bell_2, 1);
BPF_RINGBUF_OUTPUT(call_bell_3, 1);
BPF_RINGBUF_OUTPUT(call_bell_4, 1);
BPF_RINGBUF_OUTPUT(call_bell_5, 1);
BPF_RINGBUF_OUTPUT(call_bell_6, 1);
BPF_RINGBUF_OUTPUT(call_bell_7, 1);

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
	u32 key = bank * NICPS_COUNTS + sender;

	return progress.lookup(&key);
}

/* Of the sums of a channel; by arithmetic, as a branch would be two ways for the verifier. */
static __always_inline struct nicps_progress *nicps_sums_progress(u32 bank, u32 channel)
{
	u32 above = -(u64)channel >> 32; /* all bits, or none */

	return nicps_progress(bank, (NICPS_SENDERS - 1 + channel) & above);
}

static __always_inline struct nicps_token_window *nicps_token_window(u32 sender)
{
	return token_windows.lookup(&sender);
}

static __always_inline struct nicps_channel *nicps_channel(u32 number)
{
	return channels.lookup(&number);
}

static __always_inline struct nicps_sent *nicps_sent(u32 channel, u32 bank,
						     u32 aggregator)
{
	u32 key = (channel * NICPS_BANKS + bank) * NICPS_SENDERS + aggregator;

	return sent.lookup(&key);
}

static __always_inline struct nicps_desk *nicps_desk(u32 channel, u32 bank)
{
	u32 key = channel * NICPS_BANKS + bank;

	return desks.lookup(&key);
}

static __always_inline struct nicps_numbers_of *
nicps_numbers_of(u32 channel, u32 bank, u32 member, u32 fragment)
{
	u32 key = (channel * NICPS_BANKS + bank) * NICPS_DESK_MEMBERS + member;

	key = key * NICPS_DESK_FRAGMENTS + fragment;
	return numbers.lookup(&key);
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

/* The thread of that channel; without room it has not been awake for long, and looks by itself. */
static __always_inline void nicps_wake_program(u32 channel)
{
	u64 word = 0;

	switch (channel) {
	case 0:
		call_bell_0.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 1:
		call_bell_1.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 2:
		call_bell_2.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 3:
		call_bell_3.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 4:
		call_bell_4.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 5:
		call_bell_5.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 6:
		call_bell_6.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	case 7:
		call_bell_7.ringbuf_output(&word, sizeof(word), BPF_RB_FORCE_WAKEUP);
		break;
	}
}

#endif /* NICPS_MAPS_H */
