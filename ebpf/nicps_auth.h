/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Which tokens and fragments are believed in a network with a key, and the
 * numbers of own ones. Read by BPF programs.
 *
 * The tag shows that a member of this view made the frame. Its sequence number
 * shows that it is not an old one sent again: what is far behind the highest
 * of its sender is refused, and what is near, since two processors can receive
 * out of order, has its place by which it is known (a fragment's seen-bit, a
 * token's position).
 */
#ifndef NICPS_AUTH_H
#define NICPS_AUTH_H

#include "nicps_parse.h"
#include "nicps_shared_maps.h"
#include "nicps_siphash.h"

#define NICPS_BELIEVED -1

/* True if it was raised, by this processor. */
static __always_inline bool nicps_raise(u64 *highest, u64 sequence)
{
	u64 before = *highest;

	return sequence > before &&
	       __sync_val_compare_and_swap(highest, before, sequence) == before;
}

/*
 * The reason why a frame is refused, or NICPS_BELIEVED. That of an old number
 * comes first as it costs least: only numbers with a good tag raise the window.
 * `words` is how long all frames of the type are, a constant; 0: as they say.
 */
static __always_inline int nicps_doubt(u32 words, const struct nicps_header *header,
				       const struct nicps_sender *sender, u64 highest,
				       const void *end)
{
	const struct nicps_key *key = nicps_key();
	__be64 tag;
	bool whole;

	if ((u64)sender->sequence + NICPS_REPLAY_WINDOW <= highest)
		return NICPS_COUNT_REPLAYED;
	if (words)
		whole = key && nicps_long_tag(key, header, end, words, &tag);
	else
		whole = key && nicps_frame_tag(key, header, end, sender->length, &tag);
	return whole && tag == header->tag ? NICPS_BELIEVED : NICPS_COUNT_FORGED;
}

/*
 * False when this view's numbers are used up. The counter has 64 bits, so it
 * never comes round to one that was used.
 */
static __always_inline bool nicps_number(struct nicps_header *header, u64 *sequence)
{
	u64 number = __sync_fetch_and_add(sequence, 1) + 1;

	header->sequence = bpf_htonl((u32)number);
	return number <= NICPS_LAST_SEQUENCE;
}

#endif /* NICPS_AUTH_H */
