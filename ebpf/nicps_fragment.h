/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Fragments (R10, R11): each is added exactly once. Read by the XDP program.
 *
 * Two processors can receive at once, and plain additions into one slot would
 * lose each other's (tried: 359 of 360 lanes wrong). So a slot is claimed
 * before anything in it is read; a processor that finds it claimed drops its
 * frame, and the sender repairs it later like any other loss.
 *
 * A processor can also stall anywhere, for longer than a round takes: the
 * round that a frame was checked against may be over when the frame is added,
 * and a later round may have its bank. So tags are compared again under the
 * claim. They grow with the view and, in a view, with the round; a frame that
 * is older than the tag which it finds is dropped.
 */
#ifndef NICPS_FRAGMENT_H
#define NICPS_FRAGMENT_H

#include "nicps_auth.h"
#include "nicps_claim.h"
#include "nicps_lanes.h"
#include "nicps_maps.h"
#include "nicps_parse.h"
#include "nicps_stall.h"

#define NICPS_ENTERED -1

/*
 * Enter the count of this tag: until the caller has counted, no processor can
 * open another tag in it. A count that has been entered under an older tag is
 * not opened: the caller drops its frame. Returns the reason to drop the frame,
 * or NICPS_ENTERED.
 */
static __always_inline int nicps_enter(struct nicps_progress *progress, u64 tag)
{
	u64 count = __sync_fetch_and_add(&progress->count, NICPS_COUNTING);

	if (!(count & NICPS_OPENING) && progress->tag == tag)
		return NICPS_ENTERED;
	__sync_fetch_and_add(&progress->count, -(u64)NICPS_COUNTING);
	if (progress->tag > tag)
		return NICPS_COUNT_ROUND;
	count = (u32)progress->count;
	if (__sync_val_compare_and_swap(&progress->count, count,
					count | NICPS_OPENING) != count)
		return NICPS_COUNT_BUSY;
	if (progress->tag < tag) {
		/* In this order: the agent never reads an old count under a new tag. */
		__sync_fetch_and_add(&progress->count, -count);
		nicps_publish(&progress->tag, tag);
	}
	if (progress->tag > tag) {
		__sync_fetch_and_add(&progress->count, -(u64)NICPS_OPENING);
		return NICPS_COUNT_ROUND;
	}
	__sync_fetch_and_add(&progress->count, NICPS_COUNTING - NICPS_OPENING);
	return NICPS_ENTERED;
}

/* Count one fragment under the tag that was entered, and leave the count. */
static __always_inline u32 nicps_leave(struct nicps_progress *progress)
{
	u64 before = __sync_fetch_and_add(&progress->count, 1 - (u64)NICPS_COUNTING);

	return (u32)before + 1;
}

/*
 * Whether the agent must be told of a sum: of the last, of some before it, and of
 * more towards the end, where no later sums show that one was lost.
 */
static __always_inline bool nicps_count_is_due(u32 clock, u32 count, u32 fragments)
{
	s32 left = fragments - count;
	u32 step = clock;

	if (!left)
		return true;
	if (left < (s32)clock && clock > NICPS_TAIL_CLOCK)
		step = clock < NICPS_TAIL_CLOCK * NICPS_TAIL_PARTS
			       ? NICPS_TAIL_CLOCK
			       : clock / NICPS_TAIL_PARTS;
	return step && count % step == 0;
}

/* A sum has been counted: wake the agent if it must be told of this one. */
static __always_inline void nicps_post_count(u32 clock, u32 channel, u64 tag, u32 count,
					     u32 fragments)
{
	struct nicps_bell bell = {
		.tag = tag,
		.count = count,
		.fragments = fragments,
		.channel = channel,
	};

	if (nicps_count_is_due(clock, count, fragments))
		nicps_wake(&bell);
}

static __always_inline void nicps_put_fragment(struct nicps_block *block, u32 part,
					       u8 width, const void *payload, u32 shift,
					       bool first)
{
	void *at = block;

	/* The masks change no value: they are for the verifier. */
	if (width == 32)
		nicps_put_32(at + (part & 3) * (NICPS_LANES_32 * 8), payload,
			     (32 - shift) & 63, first);
	else if (width == 16)
		nicps_put_16(at + (part & 1) * (NICPS_LANES_16 * 8), payload,
			     (48 - shift) & 63, first);
	else if (width == 8)
		nicps_put_8(at, payload, (56 - shift) & 63, first);
	else
		nicps_put_raw(at + (part & 7) * NICPS_PAYLOAD_BYTES, payload);
}

/*
 * The frame is dropped after this, since no other program needs it. Only the
 * one that completes its sender's contribution goes up, to wake the agent. A
 * sum (of sender 0) stands for all members at once; a switch has no key, so
 * there is no tag to check.
 */
static __always_inline int nicps_take_in(struct nicps_cursor *cursor,
					 const struct nicps_header *header,
					 const struct nicps_sender *sender,
					 const struct nicps_config *config)
{
	struct nicps_ring *ring = nicps_ring();
	struct nicps_fragment *fragment = nicps_take_fragment(cursor);
	void *payload = nicps_take(cursor, NICPS_PAYLOAD_BYTES);
	u64 tag = (u64)sender->view << 32 | sender->round;
	u32 bank = sender->round & 1;
	struct nicps_window *window = nicps_window(0, sender->number);
	struct nicps_progress *progress;
	struct nicps_block *block;
	struct nicps_slot *slot;
	u32 index, fragments;
	bool fresh = true, sum = sender->number == 0;
	int parts, reason;
	u32 count;
	u64 bit;

	if (!fragment || !payload ||
	    sender->length != NICPS_FRAGMENT_HEADER_BYTES + NICPS_PAYLOAD_BYTES)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (sender->round < config->round_low || sender->round > config->round_high)
		return nicps_drop(NICPS_COUNT_ROUND);
	index = bpf_ntohl(fragment->index);
	fragments = bpf_ntohl(fragment->fragments);
	parts = nicps_parts(fragment->width);
	if (parts < 0 || index >= fragments || (sum && !fragment->width))
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (fragment->shift > (sum ? 0 : nicps_max_shift(fragment->width)))
		return nicps_drop(NICPS_COUNT_SHIFT);
	if (index >> parts >= config->blocks)
		return nicps_drop(NICPS_COUNT_RANGE);

	block = nicps_block(bank * config->blocks + (index >> parts));
	slot = nicps_slot(bank * config->blocks * NICPS_BLOCK_SLOTS + index);
	progress = nicps_progress(bank, sender->number);
	if (!block || !slot || !progress || !ring || !window)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (config->keyed && !sum) {
		reason = nicps_doubt(NICPS_FRAGMENT_WORDS, header, sender,
				     window->highest, cursor->end);
		if (reason != NICPS_BELIEVED)
			return nicps_drop(reason);
		fresh = nicps_raise(&window->highest, sender->sequence);
	}
	NICPS_STALL(CHECKED);
	if (!nicps_claim(&slot->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	NICPS_STALL(CLAIMED);

	bit = sum ? ~0ULL : 1ULL << ((sender->number - 1) & 63);
	if (slot->tag > tag)
		reason = NICPS_COUNT_ROUND;
	else if (slot->tag == tag && slot->seen & bit)
		reason = NICPS_COUNT_DUPLICATE;
	else /* The last step that can fail: the added fragment must be countable. */
		reason = nicps_enter(progress, tag);
	if (reason != NICPS_ENTERED) {
		nicps_release(&slot->claim);
		/* A repair that another member needed: its sender lives. */
		if (reason == NICPS_COUNT_DUPLICATE && fresh)
			ring->heard_ns = bpf_ktime_get_coarse_ns();
		return nicps_drop(reason);
	}
	if (slot->tag != tag) {
		nicps_put_fragment(block, index, fragment->width, payload,
				   fragment->shift, true);
		slot->seen = bit;
		nicps_publish(&slot->tag, tag);
	} else {
		nicps_put_fragment(block, index, fragment->width, payload,
				   fragment->shift, false);
		nicps_publish(&slot->seen, slot->seen | bit);
	}
	nicps_release(&slot->claim);
	ring->heard_ns = bpf_ktime_get_coarse_ns();

	NICPS_STALL(ADDED);
	nicps_count(NICPS_COUNT_ADDED);
	count = nicps_leave(progress);
	if (sum)
		nicps_post_count(config->clock, 0, tag, count, fragments);
	return count == fragments ? XDP_PASS : XDP_DROP;
}

#endif /* NICPS_FRAGMENT_H */
