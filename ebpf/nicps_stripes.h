/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Stripes: every member sends each fragment to the fragment's aggregator, whose
 * program adds, and sends the sum to all (docs/stripes.md). Here a member stores
 * sums and sends its next contributions. Read by the XDP program.
 */
#ifndef NICPS_STRIPES_H
#define NICPS_STRIPES_H

#include "nicps_aggregator.h"

/* Whether a sum sends no contribution. */
static __always_inline bool nicps_swallow(struct nicps_sent *sent)
{
#pragma clang loop unroll(disable)
	for (u32 tries = 0; tries < NICPS_CLAIM_TRIES; tries++) {
		u64 left = *(volatile u64 *)&sent->swallow;

		if (!left)
			return false;
		if (__sync_val_compare_and_swap(&sent->swallow, left, left - 1) == left)
			return true;
	}
	return false;
}

/*
 * Take the next fragment that this member has to send to that aggregator. NULL:
 * there is none, or its lanes are not there yet; then the agent sends it.
 */
static __always_inline struct nicps_own *
nicps_take_next(const struct nicps_config *config, const struct nicps_channel *channel,
		const struct nicps_sender *sender, u32 end, u32 *index)
{
	u32 bank = sender->round & 1;
	struct nicps_sent *sent = nicps_sent(sender->channel, bank, sender->number);
	struct nicps_own *own;
	u64 next;

	if (!sent || nicps_swallow(sent))
		return NULL;
#pragma clang loop unroll(disable)
	for (u32 tries = 0; tries < NICPS_CLAIM_TRIES; tries++) {
		next = *(volatile u64 *)&sent->next;
		*index = next;
		if (next >> 32 != sender->round || *index >= end ||
		    *index >= channel->room)
			return NULL;
		own = nicps_own(nicps_place(config, channel, bank, *index));
		if (!own || !nicps_is_offered(channel, own, bank))
			return NULL;
		/* A full barrier: the offered lanes are there. */
		if (__sync_val_compare_and_swap(&sent->next, next, next + 1) == next)
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
		const struct nicps_sender *sender, const struct nicps_channel *channel,
		const struct nicps_config *config)
{
	bool later = sender->round > channel->round;
	u64 mine = nicps_bit(config->number);
	u32 to_switch = ((u64)sender->number - 1) >> 32; /* all bits, or none */
	u32 aggregators = nicps_aggregators(config, later), index = 0;
	u32 rank = aggregator->rank[later];
	u32 stripe_end = nicps_bound(bpf_ntohl(body->fragments), rank, aggregators);
	struct nicps_own *own;
	s32 exponent;

	if (!(__be64_to_cpu(body->members) & mine) ||
	    body->width != nicps_width(channel, later))
		return XDP_DROP;
	own = nicps_take_next(config, channel, sender, stripe_end, &index);
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
		const struct nicps_channel *channel, const struct nicps_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 alone = nicps_bit(sender->number);
	u32 index = bpf_ntohl(body->index), bank = sender->round & 1, first;
	bool later = sender->round > channel->round;
	u32 aggregators = nicps_aggregators(config, later);
	u32 rank = member->rank[later];
	struct nicps_progress *progress = nicps_sums_progress(bank, sender->channel);
	struct nicps_ring *ring = nicps_ring();
	struct nicps_stored *sum;
	int reason;

	if (!nicps_in_stripe(body, rank, aggregators, &first) &&
	    (!alone || __be64_to_cpu(body->members) != alone))
		return nicps_drop(NICPS_COUNT_RANGE);
	if (index >= bpf_ntohl(body->fragments) || index >= channel->room)
		return nicps_drop(NICPS_COUNT_RANGE);
	sum = nicps_stored(nicps_place(config, channel, bank, index));
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
	nicps_post_count(channel->clock, sender->channel, tag, nicps_leave(progress),
			 bpf_ntohl(body->fragments));
	return nicps_send_next(ethernet, header, body, payload, end, member, sender,
			       channel, config);
}

/* A frame of stripes, of a member in the view that is in force. */
static __always_inline int nicps_stripe_frame(struct nicps_cursor *cursor,
					      struct ethhdr *ethernet,
					      struct nicps_header *header,
					      const struct nicps_sender *sender,
					      const struct nicps_member *member,
					      const struct nicps_channel *channel,
					      const struct nicps_config *config)
{
	struct nicps_contribution *body = nicps_take_contribution(cursor);
	void *payload = nicps_take(cursor, NICPS_PAYLOAD_BYTES);
	struct nicps_window *window = nicps_window(sender->channel, sender->number);
	struct nicps_member *me = nicps_member(config->number);
	int reason;

	if (!body || !payload || !window || !me ||
	    sender->length != NICPS_CONTRIBUTION_HEADER_BYTES + NICPS_PAYLOAD_BYTES)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (sender->round < channel->round_low || sender->round > channel->round_high)
		return nicps_drop(NICPS_COUNT_ROUND);
	if (!nicps_aggregators(config, sender->round > channel->round))
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
				       sender, channel, config);
	case NICPS_TYPE_SUM:
		return nicps_store_sum(ethernet, header, body, payload, cursor->end,
				       member, sender, channel, config);
	case NICPS_TYPE_ASK:
		return nicps_answer_ask(ethernet, header, body, payload, cursor->end,
					sender, window, channel, config);
	case NICPS_TYPE_LACKING:
		return nicps_go_up(config, sender->number);
	default:
		return nicps_drop(NICPS_COUNT_TYPE);
	}
}

#endif /* NICPS_STRIPES_H */
