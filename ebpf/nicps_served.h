/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The answers to frames of servers (docs/servers.md). Read by nicps_server.h,
 * nicps_worker.h and nicps_servers.h.
 *
 * Functions that handle one type of frame return a verdict, or one of the two
 * answers, whose fields they have written into the frame.
 */
#ifndef NICPS_SERVED_H
#define NICPS_SERVED_H

#include "nicps_home.h"

#define NICPS_ANSWER_HELD -1
#define NICPS_ANSWER_TAKEN -2

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

#endif /* NICPS_SERVED_H */
