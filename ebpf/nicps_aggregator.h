/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * An aggregator's part of stripes: contributions become sums, and questions for
 * sums are answered. Read by nicps_stripes.h.
 *
 * The text on claims and tags in nicps_fragment.h holds here too. A sum is made
 * once: with the last contribution, under the claims of its place in the stripe
 * and of its place among the sums. All steps that could fail come before
 * anything is added.
 */
#ifndef NICPS_AGGREGATOR_H
#define NICPS_AGGREGATOR_H

#include "nicps_striped.h"

/*
 * All others are in: add the aggregator's own lanes, and make the sum. Checked
 * values are read again from the place, so the paths that led here are one for
 * the verifier.
 */
static __always_inline void nicps_finish_sum(struct nicps_gather *gather,
					     struct nicps_block *block, u32 part,
					     struct nicps_contribution *body,
					     void *payload, struct nicps_stored *sum,
					     const struct nicps_own *own,
					     const struct nicps_config *config)
{
	volatile struct nicps_gather *place = gather;
	u64 mine = nicps_bit(config->number) & place->members;
	u32 width = place->width;
	s32 unit = (s8)place->unit, exponent = (s8)place->own;

	if (mine) {
		nicps_gather_lanes(block, part, width, own->lane,
				   nicps_down(width, exponent, unit), false);
		place->not_finite |= exponent == NICPS_NOT_FINITE;
		place->seen |= mine;
	}
	exponent = nicps_make_sum(block, part, width, payload, unit,
				  place->not_finite & 1);
	body->exponent = exponent;
	sum->exponent = exponent;
	nicps_copy_lanes(sum->lane, payload);
}

/* A contribution to a sum, at its aggregator. */
static __always_inline int
nicps_gather_in(struct ethhdr *ethernet, struct nicps_header *header,
		struct nicps_contribution *body, void *payload, const void *end,
		const struct nicps_sender *sender, const struct nicps_channel *channel,
		const struct nicps_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 members = __be64_to_cpu(body->members);
	u64 bit = nicps_bit(sender->number);
	u64 mine = nicps_bit(config->number) & members;
	u32 index = bpf_ntohl(body->index), bank = sender->round & 1,
	    width = body->width;
	bool later = sender->round > channel->round;
	u32 aggregators = nicps_aggregators(config, later);
	u32 rank = later ? config->rank_next : config->rank;
	s32 unit = (s8)body->unit, exponent = (s8)body->exponent, mine_at = 0;
	struct nicps_ring *ring = nicps_ring();
	struct nicps_progress *progress = nicps_sums_progress(bank, sender->channel);
	struct nicps_gather *gather;
	struct nicps_block *block;
	struct nicps_stored *sum;
	struct nicps_own *own;
	u32 first = 0, local, part, blocks;
	bool fresh, last;
	int reason = NICPS_ENTERED;

	if (!(members & bit) || members & ~config->live_members ||
	    width != nicps_width(channel, later) || nicps_parts(width) < 0 || !width)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (!nicps_fits(width, exponent, unit))
		return nicps_drop(NICPS_COUNT_SHIFT);
	if (!nicps_in_stripe(body, rank, aggregators, &first) || index >= channel->room)
		return nicps_drop(NICPS_COUNT_RANGE);
	local = index - first;
	part = local & ((1 << nicps_parts(width)) - 1);
	if (local >> nicps_parts(width) >= channel->blocks)
		return nicps_drop(NICPS_COUNT_RANGE);
	blocks = nicps_first_block(config, channel, bank);
	block = nicps_gather_block(blocks + (local >> nicps_parts(width)));
	gather = nicps_gather(blocks * NICPS_BLOCK_SLOTS + local);
	sum = nicps_stored(nicps_place(config, channel, bank, index));
	own = nicps_own(nicps_place(config, channel, bank, index));
	if (!block || !gather || !sum || !own || !ring || !progress)
		return nicps_drop(NICPS_COUNT_RANGE);
	NICPS_STALL(CHECKED);
	if (!nicps_claim_soon(&gather->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	NICPS_STALL(CLAIMED);

	fresh = gather->tag != tag;
	last = ((fresh ? 0 : gather->seen) | bit | mine) == members;
	if (gather->tag > tag)
		reason = NICPS_COUNT_ROUND;
	else if (!fresh &&
		 (gather->members != members || gather->unit != (u8)body->unit ||
		  gather->fragments != bpf_ntohl(body->fragments) ||
		  gather->width != width || gather->index != index))
		reason = NICPS_COUNT_MALFORMED;
	else if (!fresh && gather->seen & bit)
		reason = NICPS_COUNT_DUPLICATE;
	else if (last && mine && !nicps_is_offered(channel, own, bank))
		reason = NICPS_COUNT_UNREADY;
	else if (last && !nicps_claim_soon(&sum->claim))
		reason = NICPS_COUNT_BUSY;
	else if (last) {
		/* Behind the claim, a full barrier: the offered lanes are there. */
		mine_at = (s8) * (volatile u8 *)&own->exponent;
		if (mine && !nicps_fits(width, mine_at, unit))
			reason = NICPS_COUNT_UNREADY;
		else if (sum->tag >= tag)
			reason = NICPS_COUNT_ROUND;
		else
			reason = nicps_enter(progress, tag);
		if (reason != NICPS_ENTERED)
			nicps_release(&sum->claim);
	}
	if (reason != NICPS_ENTERED) {
		nicps_release(&gather->claim);
		return nicps_drop(reason);
	}

	if (fresh) {
		gather->members = members;
		gather->index = index;
		gather->fragments = bpf_ntohl(body->fragments);
		gather->unit = body->unit;
		gather->width = width;
		gather->not_finite = 0;
		gather->seen = 0;
	}
	gather->not_finite |= exponent == NICPS_NOT_FINITE;
	gather->seen |= bit;
	gather->own = mine_at;
	gather->last = last;
	nicps_publish(&gather->tag, tag);
	nicps_gather_lanes(block, part, width, payload,
			   nicps_down(width, exponent, unit), fresh);
	ring->heard_ns = bpf_ktime_get_coarse_ns();
	nicps_announce(ring, sender->channel, tag, body);
	if (!*(volatile u8 *)&gather->last) {
		nicps_release(&gather->claim);
		nicps_count(NICPS_COUNT_GATHERED);
		return XDP_DROP;
	}
	nicps_finish_sum(gather, block, part, body, payload, sum, own, config);
	sum->rest = tag;
	nicps_publish(&sum->tag, tag);
	nicps_release(&sum->claim);
	nicps_release(&gather->claim);
	NICPS_STALL(ADDED);
	nicps_count(NICPS_COUNT_SUMMED);
	nicps_post_count(channel->clock, sender->channel, tag, nicps_leave(progress),
			 bpf_ntohl(body->fragments));
	return nicps_answer(ethernet, header, NICPS_TYPE_SUM, config->everybody, end,
			    config);
}

/* A question for a sum, at its aggregator, or at the only contributor. */
static __always_inline int
nicps_answer_ask(struct ethhdr *ethernet, struct nicps_header *header,
		 struct nicps_contribution *body, void *payload, const void *end,
		 const struct nicps_sender *sender, struct nicps_window *window,
		 const struct nicps_channel *channel, const struct nicps_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 mine = nicps_bit(config->number);
	u64 lacking = __be64_to_cpu(body->members);
	bool alone = lacking == mine;
	u32 index = bpf_ntohl(body->index), bank = sender->round & 1, first = 0;
	bool later = sender->round > channel->round;
	u32 aggregators = nicps_aggregators(config, later), local;
	u32 rank = later ? config->rank_next : config->rank;
	struct nicps_member *asker = nicps_member(sender->number);
	struct nicps_gather *gather;
	struct nicps_stored *sum;
	struct nicps_own *own;
	bool ready, here;

	if (!alone && !nicps_in_stripe(body, rank, aggregators, &first))
		return nicps_drop(NICPS_COUNT_RANGE);
	local = alone ? 0 : index - first;
	if (index >= bpf_ntohl(body->fragments) || index >= channel->room ||
	    local >= channel->blocks * NICPS_BLOCK_SLOTS)
		return nicps_drop(NICPS_COUNT_RANGE);
	gather = nicps_gather(
		nicps_first_block(config, channel, bank) * NICPS_BLOCK_SLOTS + local);
	sum = nicps_stored(nicps_place(config, channel, bank, index));
	own = nicps_own(nicps_place(config, channel, bank, index));
	if (!gather || !sum || !own || !asker)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (!nicps_claim_soon(&sum->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	ready = nicps_is_offered(channel, own, bank);
	here = gather->tag == tag && !alone;
	/* A full barrier between the tag and the lanes that it stands for. */
	if (!nicps_unanswered(&window->asked, bpf_ntohl(body->number))) {
		nicps_release(&sum->claim);
		return nicps_drop(NICPS_COUNT_REPLAYED);
	}
	if (alone ? ready : sum->tag == tag) {
		body->exponent = alone ? own->exponent : sum->exponent;
		nicps_copy_lanes(payload, alone ? own->lane : sum->lane);
		header->type = NICPS_TYPE_SUM;
	} else {
		if (here && gather->index == index)
			lacking &= ~gather->seen;
		if (ready && nicps_fits(body->width, (s8)own->exponent, (s8)body->unit))
			lacking &= ~mine;
		body->members = __cpu_to_be64(lacking);
		header->type = NICPS_TYPE_LACKING;
	}
	nicps_release(&sum->claim);
	nicps_count(NICPS_COUNT_ANSWERED);
	return nicps_answer(ethernet, header, header->type, asker->mac, end, config);
}

#endif /* NICPS_AGGREGATOR_H */
