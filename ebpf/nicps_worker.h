/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * A worker's part: its program stores parameters and passes them on, and counts
 * the acknowledged fragments of its steps (docs/servers.md). Read by
 * nicps_servers.h.
 */
#ifndef NICPS_WORKER_H
#define NICPS_WORKER_H

#include "nicps_served.h"

/* A partner's question for parameters, at a worker: it passes on what it has pulled. */
static __always_inline int nicps_hand_over(struct nicps_push *body, void *payload,
					   const struct nicps_sender *sender)
{
	struct nicps_stored *stored = nicps_stored(bpf_ntohl(body->index));
	u64 rest;
	bool here;

	if (!stored)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (!nicps_claim_soon(&stored->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	rest = stored->rest;
	here = stored->tag && rest >> 32 == sender->round;
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
	nicps_post_count(config->clock, 0, number, nicps_leave(progress), fragments);
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
	nicps_post_count(config->clock, 0, number, nicps_leave(progress), config->room);
	if (body->staleness)
		nicps_acknowledge(body, index, fragments, sender, config);
	return XDP_DROP;
}

/*
 * Whether the fragment that was refused has since come, or was added: then the
 * refusal is a replayed or late frame, and does not answer the open question.
 */
static __always_inline bool nicps_is_past(const struct nicps_push *body, u32 fragments,
					  const struct nicps_config *config)
{
	u32 index = bpf_ntohl(body->index), of = bpf_ntohl(body->fragments);
	u64 number = bpf_ntohl(body->number), *taken = nicps_taken(index);
	struct nicps_stored *stored = nicps_stored(index);

	return (of == config->room && stored && stored->tag >= number) ||
	       (of == fragments && taken && *taken >= number);
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
		.unit = (u8)sender->number,
	};
	u64 now = bpf_ktime_get_coarse_ns(), told;
	int reason;

	if (!ring || !body->number)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (body->reason) {
		if (!member->rank[0] && !(config->passes & nicps_bit(sender->number)))
			return nicps_drop(NICPS_COUNT_STRANGER);
		if (nicps_is_past(body, fragments, config))
			return nicps_drop(NICPS_COUNT_DUPLICATE);
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

#endif /* NICPS_WORKER_H */
