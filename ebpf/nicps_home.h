/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * A server's homes: the place of each push fragment of its part, with its
 * parameters (docs/servers.md). Read by the XDP program.
 *
 * A program that reads or writes parameters holds the home's claim. A processor
 * can stall anywhere, so rounds are compared again under the claim, as tags are
 * in nicps_fragment.h.
 */
#ifndef NICPS_HOME_H
#define NICPS_HOME_H

#include "nicps_scale.h"
#include "nicps_striped.h"

/* The home that a frame's index names. */
struct nicps_spot {
	struct nicps_home *home;
	struct nicps_block *parameters;
	struct nicps_block *sums; /* of a synchronisation; NULL where there is none */
	u32 index; /* of the push fragment */
	u32 part; /* in its block */
	u32 fragments; /* of push fragments in the part */
};

/*
 * Bits of a lane of a step, read again wherever it matters. What the verifier knew of it, or of what follows from
 * it, would be three ways for all that comes.
 */
static __always_inline u32 nicps_pushed_width(const struct nicps_config *config)
{
	return *(volatile u32 *)&config->width;
}

static __always_inline bool nicps_is_width(u32 width)
{
	u64 widths = 1ULL << 32 | 1ULL << 16 | 1ULL << 8;

	asm volatile("" : "+r"(widths));
	return width < 64 && widths >> width & 1;
}

/* Push fragments in a block are a power of two: this one, for lanes of 8, 16, 32 bits 0, 1, 2. */
static __always_inline u32 nicps_parts_of(const struct nicps_config *config)
{
	return nicps_pushed_width(config) >> 4 & 3;
}

/* Push fragments of the vector; `room` counts fragments of 32-bit lanes. */
static __always_inline u32 nicps_pushes(const struct nicps_config *config, u32 shift)
{
	return (config->room + (1 << shift) - 1) >> shift;
}

/* Whether a push fragment is in the part of that rank. */
static __always_inline bool nicps_in_part(u32 index, u32 fragments, u32 rank,
					  u32 servers)
{
	return rank && rank <= servers &&
	       index >= nicps_bound(fragments, rank - 1, servers) &&
	       index < nicps_bound(fragments, rank, servers);
}

/* The home of a push fragment in the own part. False without a place in the maps. */
static __always_inline bool nicps_find_home(const struct nicps_config *config,
					    u32 index, u32 fragments,
					    struct nicps_spot *spot)
{
	u32 servers = config->aggregators, rank = config->rank;
	u32 first = nicps_bound(fragments, rank - 1, servers);
	u32 parts = nicps_parts_of(config), local = index - first;
	u32 block = local >> parts;

	spot->index = index;
	spot->part = local & ((1 << parts) - 1);
	spot->fragments = nicps_bound(fragments, rank, servers) - first;
	if (block >= config->gather_blocks)
		return false;
	spot->home = nicps_home(local);
	spot->parameters = nicps_parameters(block);
	spot->sums = nicps_parameters(config->gather_blocks + block);
	return spot->home && spot->parameters;
}

/* Pushes of that round that are whole here. */
static __always_inline u32 nicps_version(const struct nicps_ring *ring, u32 round)
{
	u64 version = *(volatile u64 *)&ring->version;

	return version >> 32 == round ? version : 0;
}

/*
 * One push more is whole. If the agent has begun another round meanwhile, this
 * round's count is over.
 */
static __always_inline void nicps_raise_version(struct nicps_ring *ring, u32 round)
{
#pragma clang loop unroll(disable)
	for (u32 tries = 0; tries < NICPS_CLAIM_TRIES; tries++) {
		u64 before = *(volatile u64 *)&ring->version;

		if (before >> 32 != round ||
		    __sync_val_compare_and_swap(&ring->version, before, before + 1) ==
			    before)
			return;
	}
}

/* A home with a parameter near the limits takes no more steps; the agent is told of the first. */
static __always_inline void
nicps_note_full(struct nicps_ring *ring, const struct nicps_spot *spot, u64 magnitudes)
{
	struct nicps_bell bell = {};

	if (!(magnitudes >> NICPS_FULL_BIT & 1))
		return;
	spot->home->full = 1;
	if (__sync_val_compare_and_swap(&ring->full, 0, (u64)spot->index + 1))
		return;
	bell.fragments = spot->fragments;
	nicps_wake(&bell);
}

/*
 * Claim the home. The result of a committed synchronisation is added now, by
 * the first program that claims it. Returns the reason why the frame is
 * dropped, or NICPS_ENTERED; only then is the home claimed.
 */
static __always_inline int nicps_claim_home(const struct nicps_config *config,
					    struct nicps_ring *ring,
					    const struct nicps_spot *spot, u32 round)
{
	struct nicps_home *home = spot->home;

	NICPS_STALL(CHECKED);
	if (!nicps_claim_soon(&home->claim))
		return NICPS_COUNT_BUSY;
	NICPS_STALL(CLAIMED);
	if (home->due && (u32)home->tag <= *(volatile u32 *)&config->settled &&
	    !home->full && spot->sums) {
		home->due = 0;
		nicps_note_full(ring, spot,
				nicps_add_average(spot->parameters, spot->sums,
						  spot->part,
						  nicps_pushed_width(config)));
	}
	if (*(volatile u32 *)&config->round != round) {
		nicps_release(&home->claim);
		return NICPS_COUNT_ROUND;
	}
	return NICPS_ENTERED;
}

/* Whether contributions of the open round are here: until its commit the parameters stay as they are. */
static __always_inline bool nicps_synchronises(const struct nicps_home *home, u64 tag)
{
	return home->tag == tag && home->seen;
}

/*
 * The weight of a worker's push and its staleness, which its first fragment
 * fixes. Returns the reason why the frame is dropped, or NICPS_ENTERED.
 */
static __always_inline int nicps_fix_staleness(const struct nicps_config *config,
					       struct nicps_pusher *pusher, u32 number,
					       u32 staleness,
					       struct nicps_pusher *fixed)
{
	int reason = NICPS_ENTERED;

	if (!nicps_claim_soon(&pusher->claim))
		return NICPS_COUNT_BUSY;
	if (pusher->number < number) {
		pusher->staleness = staleness;
		pusher->weight = nicps_weight(config->staleness ? staleness : 1);
		nicps_publish(&pusher->number, number);
	} else if (pusher->number > number) {
		reason = NICPS_COUNT_ROUND;
	}
	fixed->weight = pusher->weight;
	fixed->staleness = pusher->staleness;
	nicps_release(&pusher->claim);
	return reason;
}

#endif /* NICPS_HOME_H */
