/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * A server's part: its program adds steps to parameters, and answers pulls
 * (docs/servers.md). Read by nicps_servers.h.
 */
#ifndef NICPS_SERVER_H
#define NICPS_SERVER_H

#include "nicps_served.h"

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

	nicps_announce(ring, 0, tag, body);
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
		nicps_post_count(config->clock, 0, tag, nicps_leave(progress),
				 spot.fragments);
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

#endif /* NICPS_SERVER_H */
