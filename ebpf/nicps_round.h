/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Rounding 64-bit sums to lanes, without loss: the remainder of a lane stays in
 * the accumulator. Read by BPF programs.
 *
 * All lanes of a fragment are shifted right by the same number of bits, as few
 * as let the largest magnitude fit. A lane that rounds up to one more than fits
 * is reduced by one; the remainder keeps the difference.
 */
#ifndef NICPS_ROUND_H
#define NICPS_ROUND_H

#include "nicps_lanes.h"

/*
 * Hosts read lanes as float32, in which a sum of 2**128 or more is infinity. A
 * fragment with a number of 2**127 or more is made NaN: there the sum of exponent
 * and width exceeds this limit.
 */
#define NICPS_READABLE_BITS 128

/* How a fragment's sums become lanes; `keep` is 0 without remainders, else all bits. */
struct nicps_rounding {
	u64 shift;
	s64 half;
	s64 most;
	s64 keep;
	s32 exponent;
};

/* Bits that are set. */
static __always_inline u32 nicps_ones(u64 number)
{
	number -= number >> 1 & 0x5555555555555555ULL;
	number = (number & 0x3333333333333333ULL) +
		 (number >> 2 & 0x3333333333333333ULL);
	number = (number + (number >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return number * 0x0101010101010101ULL >> 56;
}

/* Bits of the number: 0 for 0. Without a branch: each would be two paths for the verifier. */
static __always_inline u32 nicps_bits(u64 number)
{
	number |= number >> 1;
	number |= number >> 2;
	number |= number >> 4;
	number |= number >> 8;
	number |= number >> 16;
	number |= number >> 32;
	return nicps_ones(number);
}

/* The OR of the magnitudes of so many sums. */
static __always_inline u64 nicps_magnitudes(const s64 *sum, u32 lanes)
{
	u64 all = 0;

#pragma clang loop unroll_count(8)
	for (u32 i = 0; i < lanes; i++)
		all |= sum[i] ^ sum[i] >> 63;
	return all;
}

static __always_inline struct nicps_rounding
nicps_rounding_of(u64 magnitudes, u32 width, s32 unit, u8 not_finite)
{
	u32 bits = nicps_bits(magnitudes);
	u32 shift = bits > width - 1 ? bits - (width - 1) : 0;
	s64 exponent = (s64)unit + shift;
	s64 lost = -(s64)not_finite |
		   (NICPS_READABLE_BITS - (s64)width - exponent) >> 63;
	struct nicps_rounding rounding;

	asm volatile("" : "+r"(lost));
	rounding.shift = shift;
	rounding.half = 1ULL << shift >> 1;
	rounding.most = (1LL << (width - 1)) - 1;
	rounding.keep = ~lost;
	rounding.exponent = (exponent & ~lost) | (NICPS_NOT_FINITE & lost);
	return rounding;
}

static __always_inline s64 nicps_lane_of(s64 sum, const struct nicps_rounding *how)
{
	s64 lane = (sum + how->half) >> how->shift;
	u64 over = how->most - lane;

	/* At most one too many. From a branch the verifier would walk each lane twice. */
	asm volatile("" : "+r"(over));
	return lane - (over >> 63);
}

/* One lane; the remainder takes the sum's place. */
static __always_inline s64 nicps_round(s64 *sum, const struct nicps_rounding *how)
{
	s64 lane = nicps_lane_of(*sum, how);

	*sum = (*sum - (lane << how->shift)) & how->keep;
	return lane;
}

static __always_inline void nicps_round_32(s64 *sum, void *payload,
					   const struct nicps_rounding *how)
{
	u64 *out = payload;

#pragma clang loop unroll_count(4)
	for (int i = 0; i < NICPS_WORDS; i++) {
		u64 high = nicps_round(&sum[2 * i], how);
		u64 low = nicps_round(&sum[2 * i + 1], how);

		out[i] = __cpu_to_be64(high << 32 | (u32)low);
	}
}

static __always_inline void nicps_round_16(s64 *sum, void *payload,
					   const struct nicps_rounding *how)
{
	__be16 *out = payload;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_LANES_16; i++)
		out[i] = bpf_htons((u16)nicps_round(&sum[i], how));
}

static __always_inline void nicps_round_8(s64 *sum, void *payload,
					  const struct nicps_rounding *how)
{
	u8 *out = payload;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_LANES_8; i++)
		out[i] = nicps_round(&sum[i], how);
}

#endif /* NICPS_ROUND_H */
