/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Parameter servers: a server's program adds steps to parameters and answers
 * pulls, a worker's stores parameters and passes them on (docs/servers.md). Read
 * by the XDP program.
 *
 * Functions that handle one type of frame return a verdict, or one of the two
 * answers, whose fields they have written into the frame.
 */
#ifndef NICPS_SERVERS_H
#define NICPS_SERVERS_H

#include "nicps_home.h"

#define NICPS_ANSWER_HELD -1
#define NICPS_ANSWER_TAKEN -2
#define NICPS_TAKEN_WORDS (NICPS_PUSH_HEADER_BYTES / 8)

/* Another member is there. A host that serves itself hears nobody by that. */
static __always_inline void nicps_note_heard(struct nicps_ring *ring,
					     const struct nicps_sender *sender,
					     const struct nicps_config *config)
{
	if (sender->number != config->number)
		ring->heard_ns = bpf_ktime_get_coarse_ns();
}

/* The fields of an answer; `width` and `index` are those of the question. */
static __always_inline void nicps_fill_answer(struct nicps_push *body, u32 version,
					      u32 staleness, u8 reason)
{
	body->version = bpf_htonl(version);
	body->staleness = bpf_htonl(staleness);
	body->reason = reason;
	body->reserved = 0;
}

static __always_inline int nicps_refuse(struct nicps_push *body, u32 version, u8 reason)
{
	nicps_count(reason == NICPS_REFUSAL_FULL ? NICPS_COUNT_FULL
						 : NICPS_COUNT_REFUSED);
	nicps_fill_answer(body, version, 0, reason);
	return NICPS_ANSWER_TAKEN;
}

/* The question is for a round that this host has not begun. */
static __always_inline int nicps_not_yet(struct nicps_push *body, u8 type)
{
	const struct nicps_contribution *contribution = (void *)body;

	if (type == NICPS_TYPE_CONTRIBUTION)
		body->number = contribution->number;
	else if (type != NICPS_TYPE_PUSH && type != NICPS_TYPE_PULL)
		return nicps_drop(NICPS_COUNT_ROUND);
	return nicps_refuse(body, 0, NICPS_REFUSAL_NOT_YET);
}

/* A fragment of a worker's step, at its server. */
static __always_inline int nicps_push_in(struct nicps_push *body, void *payload,
					 const struct nicps_sender *sender,
					 const struct nicps_config *config, u32 shift)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u32 index = bpf_ntohl(body->index), number = bpf_ntohl(body->number);
	u32 fragments = nicps_pushes(config, shift), pulled = bpf_ntohl(body->version);
	s32 down = nicps_shift_of(body->width, (s8)body->exponent);
	struct nicps_ring *ring = nicps_ring();
	struct nicps_progress *progress = nicps_progress(0, sender->number);
	struct nicps_pusher *pusher = nicps_pusher(sender->number);
	struct nicps_pusher fixed = {};
	struct nicps_scale scale;
	struct nicps_spot spot;
	u32 version, staleness = 0, *last;
	u64 magnitudes;
	int reason;

	if (body->width != config->width || bpf_ntohl(body->fragments) != fragments ||
	    !number)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (down < 0)
		return nicps_drop(NICPS_COUNT_SHIFT);
	if (!nicps_in_part(index, fragments, config->rank, config->aggregators) ||
	    !nicps_find_home(config, index, fragments, &spot) || !ring || !progress ||
	    !pusher)
		return nicps_drop(NICPS_COUNT_RANGE);
	version = nicps_version(ring, sender->round);
	if (pulled > version)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	reason = nicps_claim_home(config, ring, &spot, sender->round);
	if (reason != NICPS_ENTERED)
		return nicps_drop(reason);
	last = &spot.home->last[(sender->number - 1) & (NICPS_WORKERS - 1)];
	if (*last >= number) {
		if (pusher->number == number)
			staleness = pusher->staleness;
		nicps_release(&spot.home->claim);
		nicps_count(NICPS_COUNT_DUPLICATE);
		/* As its first fragment found it: now this step may be in it, too. */
		version = staleness ? pulled + staleness - 1 : pulled;
		nicps_fill_answer(body, version, staleness, NICPS_REFUSAL_NONE);
		return NICPS_ANSWER_TAKEN;
	}
	if (nicps_synchronises(spot.home, tag)) {
		nicps_release(&spot.home->claim);
		return nicps_refuse(body, version, NICPS_REFUSAL_SYNCHRONISING);
	}
	if (spot.home->full) {
		nicps_release(&spot.home->claim);
		return nicps_refuse(body, version, NICPS_REFUSAL_FULL);
	}
	reason = nicps_fix_staleness(config, pusher, number, version + 1 - pulled,
				     &fixed);
	NICPS_STALL(FIXED);
	if (reason == NICPS_ENTERED)
		reason = nicps_enter(progress, number);
	if (reason != NICPS_ENTERED) {
		nicps_release(&spot.home->claim);
		return nicps_drop(reason);
	}

	scale = nicps_scale_of(fixed.weight, down, ~0ULL);
	magnitudes = nicps_add_step(spot.parameters, spot.part,
				    nicps_pushed_width(config), payload, &scale);
	*last = number;
	if (nicps_pushed_width(config) == 32)
		body->exponent =
			nicps_show(nicps_lanes_in(spot.parameters, spot.part, 32),
				   magnitudes, payload);
	nicps_note_full(ring, &spot, magnitudes);
	nicps_release(&spot.home->claim);
	nicps_note_heard(ring, sender, config);
	NICPS_STALL(ADDED);
	nicps_count(NICPS_COUNT_PUSHED);
	if (nicps_leave(progress) == spot.fragments) {
		NICPS_STALL(WHOLE);
		nicps_raise_version(ring, sender->round);
	}
	nicps_fill_answer(body, version, fixed.staleness, NICPS_REFUSAL_NONE);
	return nicps_pushed_width(config) == 32 ? NICPS_ANSWER_HELD
						: NICPS_ANSWER_TAKEN;
}

/* A fragment of a step that the open round averages, at its server. */
static __always_inline int nicps_contribute(struct nicps_contribution *body,
					    void *payload,
					    const struct nicps_sender *sender,
					    const struct nicps_config *config,
					    u32 shift)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 members = __be64_to_cpu(body->members), bit = nicps_bit(sender->number);
	u32 index = bpf_ntohl(body->index), fragments = nicps_pushes(config, shift);
	s32 down = nicps_shift_of(body->width, (s8)body->exponent);
	struct nicps_push *answer = (void *)body;
	struct nicps_ring *ring = nicps_ring();
	struct nicps_progress *progress = nicps_progress(0, 0);
	struct nicps_scale scale;
	struct nicps_spot spot;
	struct nicps_home *home;
	int reason;
	u32 version;
	u64 seen;
	bool last;

	if (body->width != config->width || bpf_ntohl(body->fragments) != fragments ||
	    !body->number || !(members & bit) || members & ~config->live_members)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (down < 0)
		return nicps_drop(NICPS_COUNT_SHIFT);
	if (!nicps_in_part(index, fragments, config->rank, config->aggregators) ||
	    !nicps_find_home(config, index, fragments, &spot) || !spot.sums || !ring ||
	    !progress)
		return nicps_drop(NICPS_COUNT_RANGE);
	version = nicps_version(ring, sender->round);
	reason = nicps_claim_home(config, ring, &spot, sender->round);
	if (reason != NICPS_ENTERED)
		return nicps_drop(reason);
	home = spot.home;
	seen = home->tag == tag ? home->seen : 0;
	last = (seen | bit) == members;
	if (home->tag > tag)
		reason = NICPS_COUNT_ROUND;
	else if (seen && home->members != members)
		reason = NICPS_COUNT_MALFORMED;
	else if (seen & bit)
		reason = NICPS_COUNT_DUPLICATE;
	else if (home->full)
		reason = NICPS_COUNT_FULL;
	else if (last)
		reason = nicps_enter(progress, tag);
	if (reason != NICPS_ENTERED) {
		nicps_release(&home->claim);
		if (reason != NICPS_COUNT_DUPLICATE && reason != NICPS_COUNT_FULL)
			return nicps_drop(reason);
		nicps_count(reason);
		answer->number = body->number;
		nicps_fill_answer(answer, version, 0,
				  reason == NICPS_COUNT_FULL ? NICPS_REFUSAL_FULL
							     : NICPS_REFUSAL_NONE);
		return NICPS_ANSWER_TAKEN;
	}

	nicps_announce(ring, tag, body);
	home->members = members;
	home->seen = seen | bit;
	home->due =
		last; /* read from here on: else each value is a path for the verifier */
	nicps_publish(&home->tag, tag);
	scale = nicps_scale_of(nicps_weight(nicps_ones(members)), down,
			       (s64)(seen | -seen) >> 63);
	nicps_add_step(spot.sums, spot.part, nicps_pushed_width(config), payload,
		       &scale);
	last = *(volatile u32 *)&home->due;
	nicps_release(&home->claim);
	nicps_note_heard(ring, sender, config);
	NICPS_STALL(ADDED);
	nicps_count(last ? NICPS_COUNT_SUMMED : NICPS_COUNT_GATHERED);
	if (last)
		nicps_tell_count(config, tag, nicps_leave(progress), spot.fragments);
	answer->number = body->number;
	nicps_fill_answer(answer, version, 0, NICPS_REFUSAL_NONE);
	return NICPS_ANSWER_TAKEN;
}

/* A question for parameters, at their server. */
static __always_inline int nicps_give(struct nicps_push *body, void *payload, u32 index,
				      u32 fragments, const struct nicps_sender *sender,
				      const struct nicps_config *config, u32 shift)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u32 piece = bpf_ntohl(body->index) & ((1 << (shift & 3)) - 1);
	struct nicps_ring *ring = nicps_ring();
	struct nicps_spot spot;
	const s64 *lane;
	u32 version;
	int reason;

	if (!nicps_find_home(config, index, fragments, &spot) || !ring)
		return nicps_drop(NICPS_COUNT_RANGE);
	version = nicps_version(ring, sender->round);
	reason = nicps_claim_home(config, ring, &spot, sender->round);
	if (reason != NICPS_ENTERED)
		return nicps_drop(reason);
	if (nicps_synchronises(spot.home, tag)) {
		nicps_release(&spot.home->claim);
		return nicps_refuse(body, version, NICPS_REFUSAL_SYNCHRONISING);
	}
	/* A block has four such pieces, whatever the width of a push. */
	piece += spot.part << (shift & 3);
	lane = nicps_lanes_in(spot.parameters, piece, 32);
	body->exponent =
		nicps_show(lane, nicps_magnitudes(lane, NICPS_LANES_32), payload);
	nicps_release(&spot.home->claim);
	nicps_note_heard(ring, sender, config);
	nicps_count(NICPS_COUNT_PULLED);
	nicps_fill_answer(body, version, 0, NICPS_REFUSAL_NONE);
	return NICPS_ANSWER_HELD;
}

/* The same at another worker, which passes on its pulled parameters, or fills a new server. */
static __always_inline int nicps_hand_over(struct nicps_push *body, void *payload,
					   const struct nicps_sender *sender)
{
	struct nicps_stored *stored = nicps_stored(bpf_ntohl(body->index));
	bool any = bpf_ntohl(body->version) == NICPS_ANY_VERSION;
	u64 rest;
	bool here;

	if (!stored)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (!nicps_claim_soon(&stored->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	rest = stored->rest;
	here = stored->tag && (any || rest >> 32 == sender->round);
	if (here) {
		body->exponent = stored->exponent;
		nicps_copy_lanes(payload, stored->lane);
	}
	nicps_release(&stored->claim);
	if (!here)
		return nicps_refuse(body, 0, NICPS_REFUSAL_ABSENT);
	nicps_count(NICPS_COUNT_PASSED_ON);
	nicps_fill_answer(body, rest, 0, NICPS_REFUSAL_NONE);
	return NICPS_ANSWER_HELD;
}

/* A question for parameters. With a key each frame that asks is answered once. */
static __always_inline int nicps_pull_in(struct nicps_push *body, void *payload,
					 const struct nicps_sender *sender,
					 struct nicps_window *window,
					 const struct nicps_config *config, u32 shift)
{
	u32 place = bpf_ntohl(body->index), fragments = nicps_pushes(config, shift);
	u32 index = place >> (shift & 3);
	u64 *pulled = &window->pulled[!!(sender->flags & NICPS_FLAG_ANSWER)];

	if (body->width != 32 || bpf_ntohl(body->fragments) != config->room ||
	    !body->number)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (place >= config->room)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (config->keyed && !nicps_unanswered(pulled, sender->sequence))
		return nicps_drop(NICPS_COUNT_REPLAYED);
	if (nicps_in_part(index, fragments, config->rank, config->aggregators))
		return nicps_give(body, payload, index, fragments, sender, config,
				  shift);
	return nicps_hand_over(body, payload, sender);
}

/*
 * A server has added a fragment of this worker's step: it counts once, however
 * often it is acknowledged. Returns the reason to drop the frame, or
 * NICPS_ENTERED.
 */
static __always_inline int nicps_acknowledge(const struct nicps_push *body, u32 index,
					     u32 fragments,
					     const struct nicps_sender *sender,
					     const struct nicps_config *config)
{
	struct nicps_answered *answered = nicps_answered(sender->number);
	struct nicps_progress *progress = nicps_progress(1, 1);
	u64 number = bpf_ntohl(body->number), *taken = nicps_taken(index), before;
	int reason;

	if (!answered || !progress || !taken)
		return NICPS_COUNT_RANGE;
	nicps_raise(&answered->staleness, number << 32 | bpf_ntohl(body->staleness));
	nicps_raise(&answered->version,
		    (u64)sender->round << 32 | bpf_ntohl(body->version));
	before = *(volatile u64 *)taken;
	if (before >= number)
		return NICPS_COUNT_DUPLICATE;
	reason = nicps_enter(progress, number);
	if (reason != NICPS_ENTERED)
		return reason;
	if (__sync_val_compare_and_swap(taken, before, number) != before) {
		__sync_fetch_and_add(&progress->count, -(u64)NICPS_COUNTING);
		return NICPS_COUNT_DUPLICATE;
	}
	nicps_count(NICPS_COUNT_ACKNOWLEDGED);
	nicps_tell_count(config, number, nicps_leave(progress), fragments);
	return NICPS_ENTERED;
}

/* Parameters have come. They can acknowledge a fragment of a step, too. */
static __always_inline int
nicps_store_held(const struct nicps_push *body, const void *payload,
		 const struct nicps_sender *sender, const struct nicps_member *member,
		 const struct nicps_config *config, u32 shift)
{
	u32 place = bpf_ntohl(body->index), fragments = nicps_pushes(config, shift);
	u32 number = bpf_ntohl(body->number), index = place >> (shift & 3);
	struct nicps_progress *progress = nicps_progress(1, 0);
	struct nicps_ring *ring = nicps_ring();
	struct nicps_stored *stored;
	int reason;

	if (body->width != 32 || bpf_ntohl(body->fragments) != config->room || !number)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (!(config->passes & nicps_bit(sender->number)) &&
	    !nicps_in_part(index, fragments, member->rank[0], config->aggregators))
		return nicps_drop(NICPS_COUNT_STRANGER);
	stored = nicps_stored(place);
	if (place >= config->room || !stored || !progress || !ring)
		return nicps_drop(NICPS_COUNT_RANGE);
	NICPS_STALL(CHECKED);
	if (!nicps_claim_soon(&stored->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	NICPS_STALL(CLAIMED);
	if (stored->tag >= number)
		reason = NICPS_COUNT_DUPLICATE;
	else
		reason = nicps_enter(progress, number);
	if (reason != NICPS_ENTERED) {
		nicps_release(&stored->claim);
		return nicps_drop(reason);
	}
	nicps_copy_lanes(stored->lane, payload);
	stored->exponent = body->exponent;
	/* An answer to a step has that in it, beside what its version counts. */
	stored->rest = (u64)sender->round << 32 |
		       (u32)(bpf_ntohl(body->version) + !!body->staleness);
	nicps_publish(&stored->tag, number);
	nicps_release(&stored->claim);
	nicps_note_heard(ring, sender, config);
	NICPS_STALL(ADDED);
	nicps_count(NICPS_COUNT_STORED);
	nicps_tell_count(config, number, nicps_leave(progress), config->room);
	if (body->staleness)
		nicps_acknowledge(body, index, fragments, sender, config);
	return XDP_DROP;
}

/* A fragment of a step is added, or a question refused. */
static __always_inline int nicps_hear_taken(const struct nicps_push *body,
					    const struct nicps_sender *sender,
					    const struct nicps_member *member,
					    const struct nicps_config *config,
					    u32 shift)
{
	u32 index = bpf_ntohl(body->index), fragments = nicps_pushes(config, shift);
	struct nicps_ring *ring = nicps_ring();
	struct nicps_bell bell = {
		.tag = bpf_ntohl(body->number),
	};
	u64 now = bpf_ktime_get_coarse_ns(), told;
	int reason;

	if (!ring || !body->number)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (body->reason) {
		if (!member->rank[0] && !(config->passes & nicps_bit(sender->number)))
			return nicps_drop(NICPS_COUNT_STRANGER);
		nicps_note_heard(ring, sender, config);
		told = ring->refused_ns;
		if (told != now &&
		    __sync_val_compare_and_swap(&ring->refused_ns, told, now) == told)
			nicps_wake(&bell);
		return nicps_drop(NICPS_COUNT_REFUSED);
	}
	if (bpf_ntohl(body->fragments) != fragments)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (!nicps_in_part(index, fragments, member->rank[0], config->aggregators))
		return nicps_drop(NICPS_COUNT_STRANGER);
	nicps_note_heard(ring, sender, config);
	reason = nicps_acknowledge(body, index, fragments, sender, config);
	return reason == NICPS_ENTERED ? XDP_DROP : nicps_drop(reason);
}

/* The reason why a frame of so many words, a constant, is refused, or NICPS_BELIEVED. */
static __always_inline int nicps_doubt_served(u32 words, const struct ethhdr *ethernet,
					      const struct nicps_header *header,
					      const struct nicps_sender *sender,
					      struct nicps_window *window,
					      const struct nicps_config *config,
					      const void *end)
{
	const struct nicps_member *me = nicps_member(config->number);

	if (!me || sender->length != words * 8)
		return NICPS_COUNT_TRUNCATED;
	if (sender->round < config->round || sender->round > config->round_high)
		return NICPS_COUNT_ROUND;
	if (!config->aggregators || !nicps_is_width(nicps_pushed_width(config)))
		return NICPS_COUNT_MODE;
	if (!nicps_same_mac(ethernet->h_dest, me->mac))
		return NICPS_COUNT_ASTRAY;
	if (!config->keyed)
		return NICPS_BELIEVED;
	return nicps_doubt_striped(words, header, sender, window, end);
}

/* A frame of servers, of a member in the view that is in force. */
static __always_inline int
nicps_serve_frame(struct nicps_cursor *cursor, const struct ethhdr *ethernet,
		  struct nicps_header *header, const struct nicps_sender *sender,
		  const struct nicps_member *member, const struct nicps_config *config)
{
	struct nicps_push *body = nicps_take_push(cursor);
	struct nicps_window *window = nicps_window(sender->number);
	u32 shift = (2 - nicps_parts_of(config)) & 3;
	void *payload;
	int reason;

	if (!body || !window)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (header->type == NICPS_TYPE_TAKEN) {
		reason = nicps_doubt_served(NICPS_TAKEN_WORDS, ethernet, header, sender,
					    window, config, cursor->end);
		if (reason == NICPS_BELIEVED && sender->round > config->round)
			reason = NICPS_COUNT_ROUND;
		if (reason != NICPS_BELIEVED)
			return nicps_drop(reason);
		return nicps_hear_taken(body, sender, member, config, shift);
	}
	payload = nicps_take(cursor, NICPS_PAYLOAD_BYTES);
	if (!payload)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	reason = nicps_doubt_served(NICPS_CONTRIBUTION_WORDS, ethernet, header, sender,
				    window, config, cursor->end);
	if (reason != NICPS_BELIEVED)
		return nicps_drop(reason);
	if (sender->round > config->round)
		return nicps_not_yet(body, header->type);
	switch (header->type) {
	case NICPS_TYPE_PUSH:
		return nicps_push_in(body, payload, sender, config, shift);
	case NICPS_TYPE_PULL:
		return nicps_pull_in(body, payload, sender, window, config, shift);
	case NICPS_TYPE_HELD:
		return nicps_store_held(body, payload, sender, member, config, shift);
	case NICPS_TYPE_CONTRIBUTION:
		return nicps_contribute((void *)body, payload, sender, config, shift);
	default:
		return nicps_drop(NICPS_COUNT_TYPE);
	}
}

/* Cut the frame, whose body is written, behind that, and send it to the host that has asked. */
static __always_inline int nicps_answer_taken(struct xdp_md *ctx,
					      const struct nicps_member *asker,
					      const struct nicps_config *config)
{
	long length = (void *)(long)ctx->data_end - (void *)(long)ctx->data;
	struct nicps_cursor cursor;
	struct nicps_header *header;
	struct ethhdr *ethernet;
	int reason;

	if (bpf_xdp_adjust_tail(ctx, (int)(NICPS_ETHERNET_BYTES +
					   NICPS_PUSH_HEADER_BYTES - length)))
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	cursor = nicps_cursor_of(ctx);
	ethernet = nicps_take_ethernet(&cursor);
	header = nicps_take_header(&cursor);
	if (!ethernet || !header || !nicps_take_push(&cursor))
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	header->length = bpf_htons(NICPS_PUSH_HEADER_BYTES);
	reason = nicps_make_own(ethernet, header, NICPS_TYPE_TAKEN, asker->mac,
				config->number, config->keyed, cursor.end,
				NICPS_TAKEN_WORDS);
	return reason == NICPS_BELIEVED ? XDP_TX : nicps_drop(reason);
}

#endif /* NICPS_SERVERS_H */
