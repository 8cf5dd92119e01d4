/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * What frames of stripes and of servers have in common: the bounds of stripes,
 * the values of a round, and how a received frame is answered. Read by
 * nicps_aggregator.h, nicps_stripes.h and nicps_home.h.
 */
#ifndef NICPS_STRIPED_H
#define NICPS_STRIPED_H

#include "nicps_fragment.h"
#include "nicps_gather.h"

/* Aggregators in the open round, or in a later one; 0: it is not striped. */
static __always_inline u32 nicps_aggregators(const struct nicps_config *config,
					     bool later)
{
	return later ? config->aggregators_next : config->aggregators;
}

/* The bounds of stripes: that of rank r + 1 begins at `rank` r, and the last one ends at rank n. */
static __always_inline u32 nicps_bound(u32 fragments, u32 rank, u32 aggregators)
{
	return aggregators ? (u64)fragments * rank / aggregators : 0;
}

/* Whether a fragment is in the stripe of that rank, and where the stripe begins. */
static __always_inline bool nicps_in_stripe(const struct nicps_contribution *body,
					    u32 rank, u32 aggregators, u32 *first)
{
	u32 index = bpf_ntohl(body->index), fragments = bpf_ntohl(body->fragments);

	if (!rank || rank > aggregators)
		return false;
	*first = nicps_bound(fragments, rank - 1, aggregators);
	return index >= *first && index < nicps_bound(fragments, rank, aggregators);
}

/* Whether my own lanes are those that I have offered. */
static __always_inline bool nicps_is_offered(const struct nicps_channel *channel,
					     const struct nicps_own *own, u32 bank)
{
	u32 conversion = own->conversion;

	return conversion && conversion == channel->offered[bank & 1];
}

/* Width of the lanes in the open round, or in a later one. */
static __always_inline u32 nicps_width(const struct nicps_channel *channel, bool later)
{
	return later ? channel->width_next : channel->width;
}

/* The place of a fragment of the channel among own lanes, and among sums. */
static __always_inline u32 nicps_place(const struct nicps_config *config,
				       const struct nicps_channel *channel, u32 bank,
				       u32 index)
{
	return bank * config->room + channel->first + index;
}

/* The first of the channel's blocks of my stripe. */
static __always_inline u32 nicps_first_block(const struct nicps_config *config,
					     const struct nicps_channel *channel,
					     u32 bank)
{
	return bank * config->gather_blocks + channel->first_block;
}

/* Send the received frame back out as one of this host's. */
static __always_inline int nicps_answer(struct ethhdr *ethernet,
					struct nicps_header *header, u8 type,
					const u8 *destination, const void *end,
					const struct nicps_config *config)
{
	int reason = nicps_make_own(ethernet, header, type, destination, config->number,
				    config->keyed, end, NICPS_CONTRIBUTION_WORDS);

	return reason == NICPS_BELIEVED ? XDP_TX : nicps_drop(reason);
}

/* Send the list to the agent, once a round: it may not have heard that it is closed. */
static __always_inline void nicps_announce(struct nicps_ring *ring, u32 channel,
					   u64 tag,
					   const struct nicps_contribution *body)
{
	u64 at = (u64)channel << 1 | (tag & 1), *announced, before;
	struct nicps_bell bell = {
		.tag = tag,
		.members = __be64_to_cpu(body->members),
		.fragments = bpf_ntohl(body->fragments),
		.unit = body->unit,
		.channel = channel,
	};

	/* It changes no value: it is for the verifier. */
	asm volatile("%0 &= 15" : "+r"(at));
	announced = &ring->announced[at];
	before = *announced;
	if (before >= tag ||
	    __sync_val_compare_and_swap(announced, before, tag) != before)
		return;
	if (nicps_wake(&bell)) /* no room: the next contribution reports it */
		__sync_val_compare_and_swap(announced, tag, before);
}

#endif /* NICPS_STRIPED_H */
