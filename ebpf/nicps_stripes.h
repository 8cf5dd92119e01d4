/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Stripes: every member sends each fragment to the fragment's aggregator, whose
 * program adds, and sends the sum to all (docs/stripes.md). Read by the XDP
 * program.
 *
 * The text on claims and tags in nicps_fragment.h holds here too. A sum is made
 * once: with the last contribution, under the claims of its place in the stripe
 * and of its place among the sums. All steps that could fail come before
 * anything is added.
 */
#ifndef NICPS_STRIPES_H
#define NICPS_STRIPES_H

#include "nicps_fragment.h"
#include "nicps_gather.h"

/* Aggregators in that round; 0: it is not striped. */
static __always_inline u32 nicps_aggregators(const struct nicps_config *config,
					     u32 round)
{
	return round > config->round ? config->aggregators_next : config->aggregators;
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
static __always_inline bool nicps_is_offered(const struct nicps_config *config,
					     const struct nicps_own *own, u32 bank)
{
	u32 conversion = own->conversion;

	return conversion && conversion == config->offered[bank & 1];
}

/* Width of the lanes in that round. */
static __always_inline u32 nicps_width(const struct nicps_config *config, u32 round)
{
	return round > config->round ? config->width_next : config->width;
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

/* Send the list to the agent, once a round: it may not have heard that it is closed. */
static __always_inline void nicps_announce(struct nicps_ring *ring, u64 tag,
					   const struct nicps_contribution *body)
{
	u64 *announced = &ring->announced[tag & 1];
	u64 before = *announced;
	struct nicps_bell bell = {
		.tag = tag,
		.members = __be64_to_cpu(body->members),
		.fragments = bpf_ntohl(body->fragments),
		.unit = body->unit,
	};

	if (before >= tag ||
	    __sync_val_compare_and_swap(announced, before, tag) != before)
		return;
	if (nicps_wake(&bell)) /* no room: the next contribution reports it */
		__sync_val_compare_and_swap(announced, tag, before);
}

/* A contribution to a sum, at its aggregator. */
static __always_inline int
nicps_gather_in(struct ethhdr *ethernet, struct nicps_header *header,
		struct nicps_contribution *body, void *payload, const void *end,
		const struct nicps_sender *sender, const struct nicps_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 members = __be64_to_cpu(body->members);
	u64 bit = nicps_bit(sender->number);
	u64 mine = nicps_bit(config->number) & members;
	u32 index = bpf_ntohl(body->index), bank = sender->round & 1,
	    width = body->width;
	u32 aggregators = nicps_aggregators(config, sender->round);
	u32 rank = sender->round > config->round ? config->rank_next : config->rank;
	s32 unit = (s8)body->unit, exponent = (s8)body->exponent, mine_at = 0;
	struct nicps_ring *ring = nicps_ring();
	struct nicps_progress *progress = nicps_progress(bank, 0);
	struct nicps_gather *gather;
	struct nicps_block *block;
	struct nicps_stored *sum;
	struct nicps_own *own;
	u32 first = 0, local, part;
	bool fresh, last;
	int reason = NICPS_ENTERED;

	if (!(members & bit) || members & ~config->live_members ||
	    width != nicps_width(config, sender->round) || nicps_parts(width) < 0 ||
	    !width)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (!nicps_fits(width, exponent, unit))
		return nicps_drop(NICPS_COUNT_SHIFT);
	if (!nicps_in_stripe(body, rank, aggregators, &first) || index >= config->room)
		return nicps_drop(NICPS_COUNT_RANGE);
	local = index - first;
	part = local & ((1 << nicps_parts(width)) - 1);
	if (local >> nicps_parts(width) >= config->gather_blocks)
		return nicps_drop(NICPS_COUNT_RANGE);
	block = nicps_gather_block(bank * config->gather_blocks +
				   (local >> nicps_parts(width)));
	gather = nicps_gather(bank * config->gather_blocks * NICPS_BLOCK_SLOTS + local);
	sum = nicps_stored(bank * config->room + index);
	own = nicps_own(bank * config->room + index);
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
	else if (last && mine && !nicps_is_offered(config, own, bank))
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
	nicps_announce(ring, tag, body);
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
	nicps_tell_count(config, tag, nicps_leave(progress),
			 bpf_ntohl(body->fragments));
	return nicps_answer(ethernet, header, NICPS_TYPE_SUM, config->everybody, end,
			    config);
}

/*
 * Take the next fragment that this member has to send to that aggregator. NULL:
 * there is none, or its lanes are not there yet; then the agent sends it.
 */
static __always_inline struct nicps_own *
nicps_take_next(const struct nicps_config *config, const struct nicps_sender *sender,
		u32 end, u32 *index)
{
	u32 bank = sender->round & 1;
	u64 *sent = nicps_sent(bank, sender->number), next;
	struct nicps_own *own;

	if (!sent)
		return NULL;
#pragma clang loop unroll(disable)
	for (u32 tries = 0; tries < NICPS_CLAIM_TRIES; tries++) {
		next = *(volatile u64 *)sent;
		*index = next;
		if (next >> 32 != sender->round || *index >= end ||
		    *index >= config->room)
			return NULL;
		own = nicps_own(bank * config->room + *index);
		if (!own || !nicps_is_offered(config, own, bank))
			return NULL;
		/* A full barrier: the offered lanes are there. */
		if (__sync_val_compare_and_swap(sent, next, next + 1) == next)
			return own;
	}
	return NULL;
}

/*
 * A sum has come: its frame takes this member's next contribution to that
 * stripe back to the aggregator. So a window of them is under way until all are
 * sent, and only the kernels keep time.
 */
static __always_inline int
nicps_send_next(struct ethhdr *ethernet, struct nicps_header *header,
		struct nicps_contribution *body, void *payload, const void *end,
		const struct nicps_member *aggregator,
		const struct nicps_sender *sender, const struct nicps_config *config)
{
	u64 mine = nicps_bit(config->number);
	u32 to_switch = ((u64)sender->number - 1) >> 32; /* all bits, or none */
	u32 aggregators = nicps_aggregators(config, sender->round), index = 0;
	u32 rank = aggregator->rank[sender->round > config->round];
	u32 stripe_end = nicps_bound(bpf_ntohl(body->fragments), rank, aggregators);
	struct nicps_own *own;
	s32 exponent;

	if (!(__be64_to_cpu(body->members) & mine) ||
	    body->width != nicps_width(config, sender->round))
		return XDP_DROP;
	own = nicps_take_next(config, sender, stripe_end, &index);
	if (!own)
		return XDP_DROP;
	exponent = (s8) * (volatile u8 *)&own->exponent;
	if (!nicps_fits(body->width, exponent, (s8)body->unit))
		return XDP_DROP;
	body->index = bpf_htonl(index);
	body->number = bpf_htonl(config->rest_view[sender->round & 1]) & to_switch;
	body->behind = config->rest_behind[sender->round & 1] & to_switch;
	body->exponent = exponent;
	nicps_copy_lanes(payload, own->lane);
	nicps_count(NICPS_COUNT_CLOCKED);
	return nicps_answer(ethernet, header, NICPS_TYPE_CONTRIBUTION, aggregator->mac,
			    end, config);
}

/* A sum, from its aggregator. */
static __always_inline int
nicps_store_sum(struct ethhdr *ethernet, struct nicps_header *header,
		struct nicps_contribution *body, void *payload, const void *end,
		const struct nicps_member *member, const struct nicps_sender *sender,
		const struct nicps_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 alone = nicps_bit(sender->number);
	u32 index = bpf_ntohl(body->index), bank = sender->round & 1, first;
	u32 aggregators = nicps_aggregators(config, sender->round);
	u32 rank = member->rank[sender->round > config->round];
	struct nicps_progress *progress = nicps_progress(bank, 0);
	struct nicps_ring *ring = nicps_ring();
	struct nicps_stored *sum;
	int reason;

	if (!nicps_in_stripe(body, rank, aggregators, &first) &&
	    (!alone || __be64_to_cpu(body->members) != alone))
		return nicps_drop(NICPS_COUNT_RANGE);
	if (index >= bpf_ntohl(body->fragments) || index >= config->room)
		return nicps_drop(NICPS_COUNT_RANGE);
	sum = nicps_stored(bank * config->room + index);
	if (!sum || !ring || !progress)
		return nicps_drop(NICPS_COUNT_RANGE);
	NICPS_STALL(CHECKED);
	if (!nicps_claim_soon(&sum->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	NICPS_STALL(CLAIMED);
	if (sum->tag == tag)
		reason = NICPS_COUNT_DUPLICATE;
	else if (sum->tag > tag)
		reason = NICPS_COUNT_ROUND;
	else
		reason = nicps_enter(progress, tag);
	if (reason != NICPS_ENTERED) {
		nicps_release(&sum->claim);
		return nicps_drop(reason);
	}
	nicps_copy_lanes(sum->lane, payload);
	sum->exponent = body->exponent;
	sum->rest = 0;
	nicps_publish(&sum->tag, tag);
	nicps_release(&sum->claim);
	ring->heard_ns = bpf_ktime_get_coarse_ns();
	nicps_count(NICPS_COUNT_STORED);
	nicps_tell_count(config, tag, nicps_leave(progress),
			 bpf_ntohl(body->fragments));
	return nicps_send_next(ethernet, header, body, payload, end, member, sender,
			       config);
}

/* A question for a sum, at its aggregator, or at the only contributor. */
static __always_inline int
nicps_answer_ask(struct ethhdr *ethernet, struct nicps_header *header,
		 struct nicps_contribution *body, void *payload, const void *end,
		 const struct nicps_sender *sender, struct nicps_window *window,
		 const struct nicps_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 mine = nicps_bit(config->number);
	u64 lacking = __be64_to_cpu(body->members);
	bool alone = lacking == mine;
	u32 index = bpf_ntohl(body->index), bank = sender->round & 1, first = 0;
	u32 aggregators = nicps_aggregators(config, sender->round), local;
	u32 rank = sender->round > config->round ? config->rank_next : config->rank;
	struct nicps_member *asker = nicps_member(sender->number);
	struct nicps_gather *gather;
	struct nicps_stored *sum;
	struct nicps_own *own;
	bool ready, here;

	if (!alone && !nicps_in_stripe(body, rank, aggregators, &first))
		return nicps_drop(NICPS_COUNT_RANGE);
	local = alone ? 0 : index - first;
	if (index >= bpf_ntohl(body->fragments) || index >= config->room ||
	    local >= config->gather_blocks * NICPS_BLOCK_SLOTS)
		return nicps_drop(NICPS_COUNT_RANGE);
	gather = nicps_gather(bank * config->gather_blocks * NICPS_BLOCK_SLOTS + local);
	sum = nicps_stored(bank * config->room + index);
	own = nicps_own(bank * config->room + index);
	if (!gather || !sum || !own || !asker)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (!nicps_claim_soon(&sum->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	ready = nicps_is_offered(config, own, bank);
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

/* A frame of stripes, of a member in the view that is in force. */
static __always_inline int
nicps_stripe_frame(struct nicps_cursor *cursor, struct ethhdr *ethernet,
		   struct nicps_header *header, const struct nicps_sender *sender,
		   const struct nicps_member *member, const struct nicps_config *config)
{
	struct nicps_contribution *body = nicps_take_contribution(cursor);
	void *payload = nicps_take(cursor, NICPS_PAYLOAD_BYTES);
	struct nicps_window *window = nicps_window(sender->number);
	struct nicps_member *me = nicps_member(config->number);
	int reason;

	if (!body || !payload || !window || !me ||
	    sender->length != NICPS_CONTRIBUTION_HEADER_BYTES + NICPS_PAYLOAD_BYTES)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (sender->round < config->round_low || sender->round > config->round_high)
		return nicps_drop(NICPS_COUNT_ROUND);
	if (!nicps_aggregators(config, sender->round))
		return nicps_drop(NICPS_COUNT_MODE);
	/* A switch that has forgotten this member's port sends the frame to all. */
	if (header->type != NICPS_TYPE_SUM &&
	    !nicps_same_mac(ethernet->h_dest, me->mac))
		return nicps_drop(NICPS_COUNT_ASTRAY);
	if (config->keyed) {
		reason = nicps_doubt_striped(NICPS_CONTRIBUTION_WORDS, header, sender,
					     window, cursor->end);
		if (reason != NICPS_BELIEVED)
			return nicps_drop(reason);
	}
	switch (header->type) {
	case NICPS_TYPE_CONTRIBUTION:
		return nicps_gather_in(ethernet, header, body, payload, cursor->end,
				       sender, config);
	case NICPS_TYPE_SUM:
		return nicps_store_sum(ethernet, header, body, payload, cursor->end,
				       member, sender, config);
	case NICPS_TYPE_ASK:
		return nicps_answer_ask(ethernet, header, body, payload, cursor->end,
					sender, window, config);
	case NICPS_TYPE_LACKING:
		return nicps_go_up(config, sender->number);
	default:
		return nicps_drop(NICPS_COUNT_TYPE);
	}
}

#endif /* NICPS_STRIPES_H */
