/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The token (R9, R10). Forwarded at once if this host has no use for it, raised
 * to the agent otherwise. Read by the XDP program.
 */
#ifndef NICPS_TOKEN_H
#define NICPS_TOKEN_H

#include "nicps_auth.h"
#include "nicps_maps.h"
#include "nicps_parse.h"
#include "nicps_sign.h"
#include "nicps_stall.h"

/*
 * Whether every fragment that the token knows of is here. Counts received
 * fragments, not those in the sum that a reader may have taken since. A count
 * that another processor opens meanwhile may be read wrong: a token that is
 * bounced for that comes round again, since only the agent marks a member
 * complete.
 */
static __always_inline bool nicps_complete(const struct nicps_config *config,
					   const struct nicps_sender *sender, u32 sent)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	struct nicps_progress *progress;
	u32 here = config->own_sent;

#pragma clang loop unroll(disable)
	for (u32 number = 0; number < NICPS_SENDERS; number++) {
		if (number > config->members)
			break;
		progress = nicps_progress(sender->round & 1, number);
		if (!progress)
			return false;
		if (progress->tag == tag)
			here += (u32)progress->count;
	}
	return here == sent;
}

/*
 * The copy of the bounced token is written by one processor at a time; its
 * version is odd meanwhile. The operations that begin and end this must be full
 * barriers, or the agent can meet an even version beside half a frame. Of the
 * atomic operations of BPF those that return the old value are full barriers on
 * every architecture. An addition whose result is not used is compiled to one
 * that returns nothing: it orders nothing on arm64.
 */
static __always_inline bool nicps_begin_saving(struct nicps_saved *saved)
{
	u64 version = saved->version;

	return !(version & 1) && __sync_val_compare_and_swap(&saved->version, version,
							     version + 1) == version;
}

static __always_inline void nicps_end_saving(struct nicps_saved *saved)
{
	__sync_lock_test_and_set(&saved->version, saved->version + 1);
}

/*
 * A program outlives a stopped agent and must not act as a living member: hence
 * the time. If an idle turn is about to end at this host, the agent gets the
 * token and parks it.
 */
static __always_inline bool nicps_may_bounce(const struct nicps_config *config,
					     const struct nicps_sender *sender,
					     const struct nicps_token *token)
{
	const u16 harmless = NICPS_FLAG_REPEAT | NICPS_FLAG_BOUNCED;

	return config->bounce && (!config->keyed || nicps_numbers_left()) &&
	       token->hop != NICPS_LAST_HOP && sender->round == config->round &&
	       token->state == NICPS_STATE_OPEN && token->ranges == 0 &&
	       !(sender->flags & ~harmless) &&
	       (u32)bpf_ntohs(token->idle) + 1 < config->live &&
	       nicps_complete(config, sender, bpf_ntohl(token->sent)) &&
	       bpf_ktime_get_ns() < config->alive_until_ns;
}

/* Between nicps_begin_saving and nicps_end_saving. */
static __always_inline int
nicps_bounce(struct xdp_md *ctx, void *end, struct ethhdr *ethernet,
	     struct nicps_header *header, struct nicps_token *token,
	     const struct nicps_config *config, struct nicps_saved *saved,
	     struct nicps_ring *ring, u32 length, u64 position)
{
	struct nicps_outgoing *outgoing = nicps_outgoing();
	struct nicps_key *key = nicps_key();
	struct nicps_member *me = nicps_member(config->number);
	u64 size = length;

	if (!me || !outgoing || !key) {
		nicps_end_saving(saved);
		return nicps_drop(NICPS_COUNT_MALFORMED);
	}
	__builtin_memcpy(ethernet->h_source, me->mac, ETH_ALEN);
	header->sender = bpf_htons(config->number);
	header->flags = bpf_htons(NICPS_FLAG_BOUNCED);
	token->hop = bpf_htonl((u32)position);
	token->owner = bpf_htons(config->next);
	token->idle = bpf_htons(bpf_ntohs(token->idle) + 1);
	if (config->keyed) {
		nicps_number(header, &outgoing->sequence);
		nicps_frame_tag(key, header, end, length, &header->tag);
	}

	NICPS_STALL(BOUNCED);
	saved->length = size;
	/* Checked before, but the verifier of Linux 6.1 requires each bound here. */
	asm volatile("" : "+r"(size));
	if (size <= NICPS_SAVED_BYTES) {
		asm volatile("" : "+r"(size));
		if (size >= NICPS_TOKEN_HEADER_BYTES)
			bpf_xdp_load_bytes(ctx, sizeof(*ethernet), saved->frame, size);
	}
	ring->bounced = position;
	ring->bounces++;
	nicps_end_saving(saved);
	nicps_count(NICPS_COUNT_BOUNCED);
	return XDP_TX;
}

static __always_inline int
nicps_pass_on(struct xdp_md *ctx, struct nicps_cursor *cursor, struct ethhdr *ethernet,
	      struct nicps_header *header, const struct nicps_sender *sender,
	      const struct nicps_config *config)
{
	struct nicps_token_window *window = nicps_token_window(sender->number);
	struct nicps_token *token = nicps_take_token(cursor);
	struct nicps_saved *saved = nicps_saved();
	struct nicps_ring *ring = nicps_ring();
	struct nicps_member *owner;
	u32 length = sender->length;
	u64 position, seen, next;
	bool mine, bounce;
	int doubt;

	if (!token || !ring || !saved || !window || length < NICPS_TOKEN_HEADER_BYTES ||
	    length > NICPS_MAX_FRAME_BYTES)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	owner = nicps_live(config, bpf_ntohs(token->owner));
	if (!owner || token->members != config->members ||
	    length !=
		    NICPS_TOKEN_HEADER_BYTES +
			    token->members * (u32)sizeof(struct nicps_entry) +
			    bpf_ntohs(token->ranges) * (u32)sizeof(struct nicps_range))
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (config->keyed) {
		doubt = nicps_doubt(0, header, sender, window->highest, cursor->end);
		if (doubt != NICPS_BELIEVED)
			return nicps_drop(doubt);
		nicps_raise(&window->highest, sender->sequence);
		/* An old token is stale, but every repeat goes up: once. */
		if (sender->flags & NICPS_FLAG_REPEAT &&
		    !nicps_raise(&window->repeat, sender->sequence))
			return nicps_drop(NICPS_COUNT_REPLAYED);
	}

	position = (u64)bpf_ntohl(token->generation) << 32 | bpf_ntohl(token->hop);
	seen = ring->seen;
	if (position <= seen || position <= config->position) {
		if (!(sender->flags & NICPS_FLAG_REPEAT))
			return nicps_drop(NICPS_COUNT_STALE);
		nicps_count(NICPS_COUNT_RAISED);
		return XDP_PASS;
	}
	mine = bpf_ntohs(token->owner) == config->number;
	/* If another processor bounces a token now, the agent gets this one. */
	bounce = mine && nicps_may_bounce(config, sender, token) &&
		 nicps_begin_saving(saved);
	next = bounce ? position + 1 : position;
	/* A loss here means that another processor has a token: mostly a copy of this one. */
	if (__sync_val_compare_and_swap(&ring->seen, seen, next) != seen) {
		if (bounce)
			nicps_end_saving(saved);
		return nicps_drop(NICPS_COUNT_STALE);
	}
	ring->token_ns = bpf_ktime_get_coarse_ns();
	ring->heard_ns = ring->token_ns;
	if (bounce)
		return nicps_bounce(ctx, cursor->end, ethernet, header, token, config,
				    saved, ring, length, next);
	if (!mine && !(sender->flags & (NICPS_FLAG_REPEAT | NICPS_FLAG_PARKED)) &&
	    sender->round == config->round && token->state == NICPS_STATE_OPEN &&
	    bpf_ntohl(token->sent) == config->sent_seen)
		return nicps_drop(NICPS_COUNT_HEARD);
	nicps_count(NICPS_COUNT_RAISED);
	return XDP_PASS;
}

#endif /* NICPS_TOKEN_H */
