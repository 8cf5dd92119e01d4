/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The checks of tokens and fragments in a network with a key, and the numbers
 * of own ones. Read by BPF programs.
 *
 * The tag shows that a member of this view made the frame. Its sequence number
 * shows that it is not an old one sent again. A number far behind the highest
 * of its sender is refused. Two processors can receive out of order, so a near
 * number passes; such a frame is recognised by its place (a fragment's
 * seen-bit, a token's position).
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
 * The reason why a frame is refused, or NICPS_BELIEVED. The number is checked
 * first as that costs least: only numbers with a good tag raise the window.
 * `words` is the length of all frames of the type, a constant; 0: the length in
 * the frame.
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
 * never returns to a used number.
 */
static __always_inline bool nicps_number(struct nicps_header *header, u64 *sequence)
{
	u64 number = __sync_fetch_and_add(sequence, 1) + 1;

	header->sequence = bpf_htonl((u32)number);
	return number <= NICPS_LAST_SEQUENCE;
}

#endif /* NICPS_AUTH_H */
