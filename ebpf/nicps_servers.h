/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Parameter servers: the checks of a frame, and where each type goes
 * (docs/servers.md). Read by the XDP program.
 */
#ifndef NICPS_SERVERS_H
#define NICPS_SERVERS_H

#include "nicps_server.h"
#include "nicps_worker.h"

#define NICPS_TAKEN_WORDS (NICPS_PUSH_HEADER_BYTES / 8)

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
	struct nicps_window *window = nicps_window(sender->channel, sender->number);
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

#endif /* NICPS_SERVERS_H */
