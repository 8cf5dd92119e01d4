/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Contributions become a sum, and questions are answered: for an aggregator of
 * stripes and for a Linux switch. Read by XDP programs.
 */
#ifndef NICPS_GATHER_H
#define NICPS_GATHER_H

#include "nicps_auth.h"
#include "nicps_claim.h"
#include "nicps_parse.h"
#include "nicps_round.h"
#include "nicps_shared_maps.h"
#include "nicps_stall.h"

#define NICPS_CONTRIBUTION_WORDS \
	((NICPS_CONTRIBUTION_HEADER_BYTES + NICPS_PAYLOAD_BYTES) / 8)

/* A member's bit in a list; a switch, number 0, has none. */
static __always_inline u64 nicps_bit(u32 number)
{
	return number ? 1ULL << ((number - 1) & 63) : 0;
}

/* All bits if `one` is less than `other`, else none; without a branch for the verifier. */
static __always_inline s64 nicps_less(s64 one, s64 other)
{
	s64 less = (one - other) >> 63;

	asm volatile("" : "+r"(less));
	return less;
}

/*
 * Lanes of that exponent, in units: the shift to the right from the top of 64
 * bits. Bits below the unit are rounded down. The shift of lanes that are not
 * finite has no meaning, and must not overflow.
 */
static __always_inline u32 nicps_down(u32 width, s32 exponent, s32 unit)
{
	s64 least = 64 - (s64)width - nicps_max_shift(width);
	s64 down = 64 - (s64)width - (exponent - unit);

	down += (least - down) & nicps_less(down, least);
	down += (63 - down) & nicps_less(63, down);
	return down & 63;
}

static __always_inline void nicps_gather_lanes(struct nicps_block *block, u32 part,
					       u32 width, const void *lanes, u32 down,
					       bool first)
{
	s64 *sum = (s64 *)block;

	if (width == 32)
		sum += (part & 3) * NICPS_LANES_32;
	else if (width == 16)
		sum += (part & 1) * NICPS_LANES_16;
	if (width == 32 && first)
		nicps_put_32(sum, lanes, down, true);
	else if (width == 32)
		nicps_put_32(sum, lanes, down, false);
	else if (width == 16 && first)
		nicps_put_16(sum, lanes, down, true);
	else if (width == 16)
		nicps_put_16(sum, lanes, down, false);
	else if (first)
		nicps_put_8(sum, lanes, down, true);
	else
		nicps_put_8(sum, lanes, down, false);
}

/*
 * Round the fragment's sums into the payload; returns their exponent. A sum
 * that is not finite, or too large for an exponent, leaves no remainder.
 */
static __always_inline s32 nicps_make_sum(struct nicps_block *block, u32 part,
					  u32 width, void *payload, s32 unit,
					  u8 not_finite)
{
	struct nicps_rounding how;
	s64 *sum = (s64 *)block;
	u64 magnitudes;

	if (width == 32) {
		sum += (part & 3) * NICPS_LANES_32;
		magnitudes = nicps_magnitudes(sum, NICPS_LANES_32);
		how = nicps_rounding_of(magnitudes, 32, unit, not_finite);
		nicps_round_32(sum, payload, &how);
	} else if (width == 16) {
		sum += (part & 1) * NICPS_LANES_16;
		magnitudes = nicps_magnitudes(sum, NICPS_LANES_16);
		how = nicps_rounding_of(magnitudes, 16, unit, not_finite);
		nicps_round_16(sum, payload, &how);
	} else {
		magnitudes = nicps_magnitudes(sum, NICPS_LANES_8);
		how = nicps_rounding_of(magnitudes, 8, unit, not_finite);
		nicps_round_8(sum, payload, &how);
	}
	return how.exponent;
}

/* Whether lanes of that exponent can be added. */
static __always_inline bool nicps_fits(u32 width, s32 exponent, s32 unit)
{
	return exponent == NICPS_NOT_FINITE ||
	       exponent - unit <= (s32)nicps_max_shift(width);
}

static __always_inline void nicps_copy_lanes(void *to, const void *from)
{
	u64 *out = to;
	const u64 *in = from;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_WORDS; i++)
		out[i] = in[i];
}

/*
 * Whether a question has not been answered yet; it counts as answered from now
 * on. If two processors ask at once one gets false: the member asks again.
 */
static __always_inline bool nicps_unanswered(u64 *asked, u32 number)
{
	u64 before = *asked, after;
	u32 newest = before >> 32, behind;

	if (number > newest) {
		behind = number - newest;
		after = behind > 32 ? 0 : (u32)(before << (behind & 31));
		if (behind <= 32)
			after = (behind == 32 ? 0 : after) |
				1ULL << ((behind - 1) & 31);
		after |= (u64)number << 32;
	} else {
		behind = newest - number;
		if (!behind || behind > 32 || before >> ((behind - 1) & 31) & 1)
			return false;
		after = before | 1ULL << ((behind - 1) & 31);
	}
	return __sync_val_compare_and_swap(asked, before, after) == before;
}

/*
 * Make the received frame into one of this sender's, of the same channel. The
 * body and the lanes are written already; `words` is its length, a constant. Returns the reason why it
 * cannot be sent, or NICPS_BELIEVED.
 */
static __always_inline int nicps_make_own(struct ethhdr *ethernet,
					  struct nicps_header *header, u8 type,
					  const u8 *destination, u32 number, u32 keyed,
					  const void *end, u32 words)
{
	struct nicps_outgoing *outgoing = nicps_outgoing();
	struct nicps_member *me = nicps_member(number);
	struct nicps_key *key = nicps_key();
	__be64 tag = 0;

	if (!me || !outgoing || !key)
		return NICPS_COUNT_MALFORMED;
	__builtin_memcpy(ethernet->h_dest, destination, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, me->mac, ETH_ALEN);
	header->type = type;
	header->flags &= bpf_htons(NICPS_CHANNEL_MASK);
	header->flags |= bpf_htons(NICPS_FLAG_ANSWER);
	header->sender = bpf_htons(number);
	header->sequence = 0;
	if (keyed) {
		if (!nicps_number(header, &outgoing->answers))
			return NICPS_COUNT_SPENT;
		nicps_long_tag(key, header, end, words, &tag);
	}
	header->tag = tag;
	return NICPS_BELIEVED;
}

/*
 * Cut the received frame, whose body is written, behind that, and make it into
 * one of this sender's, as nicps_make_own. `bytes` are those of header and body,
 * a constant. Returns the verdict.
 */
static __always_inline int nicps_answer_short(struct xdp_md *ctx, u8 type, u32 bytes,
					      const u8 *destination, u32 number,
					      u32 keyed)
{
	long length = (void *)(long)ctx->data_end - (void *)(long)ctx->data;
	struct nicps_cursor cursor;
	struct nicps_header *header;
	struct ethhdr *ethernet;
	int reason;

	if (bpf_xdp_adjust_tail(ctx, (int)(NICPS_ETHERNET_BYTES + bytes - length)))
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	cursor = nicps_cursor_of(ctx);
	ethernet = nicps_take_ethernet(&cursor);
	header = nicps_take_header(&cursor);
	if (!ethernet || !header || !nicps_take(&cursor, bytes - sizeof(*header)))
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	header->length = bpf_htons(bytes);
	reason = nicps_make_own(ethernet, header, type, destination, number, keyed,
				cursor.end, bytes / 8);
	return reason == NICPS_BELIEVED ? XDP_TX : nicps_drop(reason);
}

/*
 * The reason why a frame of stripes is refused, or NICPS_BELIEVED. Its number
 * is one of the queue or of the program's answers, and raises that window.
 */
static __always_inline int nicps_doubt_striped(u32 words,
					       const struct nicps_header *header,
					       const struct nicps_sender *sender,
					       struct nicps_window *window,
					       const void *end)
{
	u64 *highest = sender->flags & NICPS_FLAG_ANSWER ? &window->answers
							 : &window->highest;
	int reason = nicps_doubt(words, header, sender, *highest, end);

	if (reason == NICPS_BELIEVED)
		nicps_raise(highest, sender->sequence);
	return reason;
}

#endif /* NICPS_GATHER_H */
