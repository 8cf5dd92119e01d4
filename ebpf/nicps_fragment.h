/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Fragments (R10, R11): each is added exactly once. Read by the XDP program.
 *
 * Two processors can receive at once, and plain additions into one slot would
 * lose each other's (tried: 359 of 360 lanes wrong). So a slot is claimed
 * before anything in it is read; who finds it claimed drops its frame, and
 * the sender repairs it later like any other loss.
 */
#ifndef NICPS_FRAGMENT_H
#define NICPS_FRAGMENT_H

#include "nicps_auth.h"
#include "nicps_lanes.h"
#include "nicps_maps.h"
#include "nicps_parse.h"

static __always_inline bool nicps_claim(u64 *claim)
{
	return __sync_val_compare_and_swap(claim, 0, 1) == 0;
}

/* An exchange, not a store: it is a full barrier on every architecture. */
static __always_inline void nicps_release(u64 *claim)
{
	__sync_lock_test_and_set(claim, 0);
}

/*
 * Trainers read sums without a claim once the seen-bits say that they are
 * final: what says so must not be visible before the lanes are.
 */
static __always_inline void nicps_publish(u64 *word, u64 value)
{
	__sync_lock_test_and_set(word, value);
}

/* Make the count one of this tag, from zero; false if another processor is at it. */
static __always_inline bool nicps_open(struct nicps_progress *progress, u64 tag)
{
	if (progress->tag == tag)
		return true;
	if (!nicps_claim(&progress->claim))
		return false;
	if (progress->tag != tag) {
		progress->count = 0;
		__sync_lock_test_and_set(&progress->tag, tag);
	}
	nicps_release(&progress->claim);
	return true;
}

static __always_inline void nicps_put_fragment(struct nicps_block *block, u32 part,
					       u8 width, const void *payload, u32 shift,
					       bool first)
{
	void *at = block;

	/* The masks say nothing new: they are there for the verifier. */
	if (width == 32)
		nicps_put_32(at + (part & 3) * (NICPS_LANES_32 * 8), payload,
			     shift & 31, first);
	else if (width == 16)
		nicps_put_16(at + (part & 1) * (NICPS_LANES_16 * 8), payload,
			     shift & 63, first);
	else if (width == 8)
		nicps_put_8(at, payload, shift & 63, first);
	else
		nicps_put_raw(at + (part & 7) * NICPS_PAYLOAD_BYTES, payload);
}

/* Fragments of that width in a block, as a power of two; below 0 for no width of ours. */
static __always_inline int nicps_parts(u8 width)
{
	if (width == 32)
		return 2;
	if (width == 16)
		return 1;
	if (width == 8)
		return 0;
	return width == 0 ? 3 : -1;
}

static __always_inline u32 nicps_max_shift(u8 width)
{
	if (width == 32)
		return NICPS_MAX_SHIFT_32;
	if (width == 16)
		return NICPS_MAX_SHIFT_16;
	return width == 8 ? NICPS_MAX_SHIFT_8 : NICPS_MAX_SHIFT_0;
}

/*
 * Dropped when it has been dealt with, as nobody else needs it; only the one
 * that completes its sender goes up, to wake the agent. A sum (of sender 0) is
 * all members at once; a switch has no key, so there is no tag to check.
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
	struct nicps_window *window = nicps_window(sender->number);
	struct nicps_progress *own, *all;
	struct nicps_block *block;
	struct nicps_slot *slot;
	u32 index, fragments;
	bool fresh = true, sum = sender->number == 0;
	int parts, doubt;
	u64 bit, count;

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
	own = nicps_progress(bank, sender->number);
	all = nicps_progress(bank, 0);
	if (!block || !slot || !own || !all || !ring || !window)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (config->keyed && !sum) {
		doubt = nicps_doubt(NICPS_TYPE_FRAGMENT, header, sender, window,
				    cursor->end);
		if (doubt != NICPS_BELIEVED)
			return nicps_drop(doubt);
		fresh = nicps_raise(&window->highest, sender->sequence);
	}
	/* Counts are opened first: what has been added must be countable. */
	if (!nicps_open(own, tag) || !nicps_open(all, tag) ||
	    !nicps_claim(&slot->claim))
		return nicps_drop(NICPS_COUNT_BUSY);

	bit = sum ? ~0ULL : 1ULL << ((sender->number - 1) & 63);
	if (slot->tag != tag) {
		nicps_put_fragment(block, index, fragment->width, payload,
				   fragment->shift, true);
		slot->seen = bit;
		nicps_publish(&slot->tag, tag);
	} else if (!(slot->seen & bit)) {
		nicps_put_fragment(block, index, fragment->width, payload,
				   fragment->shift, false);
		nicps_publish(&slot->seen, slot->seen | bit);
	} else {
		nicps_release(&slot->claim);
		/* A repair that somebody else needed: its sender lives. */
		if (fresh)
			ring->heard_ns = bpf_ktime_get_coarse_ns();
		return nicps_drop(NICPS_COUNT_DUPLICATE);
	}
	nicps_release(&slot->claim);
	ring->heard_ns = bpf_ktime_get_coarse_ns();

	nicps_count(NICPS_COUNT_ADDED);
	if (!sum)
		__sync_fetch_and_add(&all->count, 1);
	count = __sync_fetch_and_add(&own->count, 1) + 1;
	return count == fragments ? XDP_PASS : XDP_DROP;
}

#endif /* NICPS_FRAGMENT_H */
