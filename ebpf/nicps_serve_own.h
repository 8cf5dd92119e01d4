/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * A host that serves and trains: what its own step, and its own questions, do at
 * its own part, by the rules of nicps_servers.h and without a frame on the wire.
 * The agent runs this program by a test run. It repeats one frame, behind whose
 * payload the body is once more, with the index of the next fragment.
 */
#ifndef NICPS_SERVE_OWN_H
#define NICPS_SERVE_OWN_H

#include "nicps_servers.h"

/* The lanes of a fragment of the own step are in the frame. */
static __always_inline bool nicps_take_own(struct nicps_header *header, void *payload,
					   struct nicps_push *body, u32 index)
{
	struct nicps_contribution *contribution = (void *)body;
	struct nicps_own *own = nicps_own(index);

	if (!own)
		return false;
	nicps_copy_lanes(payload, own->lane);
	if (header->type == NICPS_TYPE_CONTRIBUTION)
		contribution->exponent = own->exponent;
	else
		body->exponent = own->exponent;
	return true;
}

/* A verdict, or one of the two answers, as it would come from another host. */
static __always_inline int nicps_ask_own(struct nicps_header *header,
					 struct nicps_push *body, void *payload,
					 const struct nicps_sender *sender,
					 const struct nicps_config *config, u32 shift)
{
	u32 place = bpf_ntohl(body->index), fragments = nicps_pushes(config, shift);
	u32 index = place >> (shift & 3);

	if (sender->round > config->round)
		return nicps_not_yet(body, header->type);
	if (header->type == NICPS_TYPE_PULL) {
		if (place >= config->room ||
		    !nicps_in_part(index, fragments, config->rank, config->aggregators))
			return nicps_drop(NICPS_COUNT_RANGE);
		return nicps_give(body, payload, index, fragments, sender, config,
				  shift);
	}
	if (!nicps_take_own(header, payload, body, place))
		return nicps_drop(NICPS_COUNT_RANGE);
	if (header->type == NICPS_TYPE_PUSH)
		return nicps_push_in(body, payload, sender, config, shift);
	return nicps_contribute((void *)body, payload, sender, config, shift);
}

static __always_inline int nicps_serve_own_frame(struct nicps_cursor *cursor,
						 const struct nicps_config *config)
{
	struct nicps_header *header = nicps_take_header(cursor);
	struct nicps_push *body = nicps_take_push(cursor), *next;
	void *payload = nicps_take(cursor, NICPS_PAYLOAD_BYTES);
	struct nicps_member *me = nicps_live(config, config->number);
	u32 shift = (2 - nicps_parts_of(config)) & 3;
	struct nicps_sender sender;
	int answer;

	next = nicps_take_push(cursor);
	if (!header || !body || !payload || !next)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	sender = nicps_sender_of(header);
	if (!config->enabled || !me || sender.view != config->view ||
	    sender.number != config->number)
		return nicps_drop(NICPS_COUNT_VIEW);
	if (sender.round < config->round || sender.round > config->round_high)
		return nicps_drop(NICPS_COUNT_ROUND);
	if (!config->aggregators || !nicps_is_width(nicps_pushed_width(config)))
		return nicps_drop(NICPS_COUNT_MODE);
	*body = *next;
	next->index = bpf_htonl(bpf_ntohl(next->index) + 1);
	answer = nicps_ask_own(header, body, payload, &sender, config, shift);
	if (answer == NICPS_ANSWER_HELD)
		return nicps_store_held(body, payload, &sender, me, config, shift);
	if (answer == NICPS_ANSWER_TAKEN)
		return nicps_hear_taken(body, &sender, me, config, shift);
	return answer;
}

#endif /* NICPS_SERVE_OWN_H */
