/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Steps: lanes times a weight, added to parameters of 64 bits, and parameters
 * rounded to lanes. Read by the XDP program.
 *
 * A parameter is a multiple of 2**-NICPS_PARAMETER_BITS. A lane of any width is
 * shifted to the top of 32 bits. So a product has at most 62 bits, and half of
 * the bits that are shifted out can be added before the shift.
 *
 * Loops are unrolled in part: the verifier walks every turn of them.
 */
#ifndef NICPS_SCALE_H
#define NICPS_SCALE_H

#include "nicps_gather.h"
#include "nicps_lanes.h"
#include "nicps_round.h"

#define NICPS_WEIGHT_BITS 30 /* a weight is out of 2**30 */
#define NICPS_FULL_BIT \
	62 /* of a magnitude: a parameter of that size takes no more steps */

/* How lanes become addends; `keep` is 0 if the sum begins with them, else all bits. */
struct nicps_scale {
	s64 weight;
	s64 half;
	s64 keep;
	u64 down;
};

/* Of one of so many. */
static __always_inline u64 nicps_weight(u64 parts)
{
	return parts ? ((1ULL << NICPS_WEIGHT_BITS) + parts / 2) / parts : 0;
}

/* The shift to the right of a product; below 0 where a step could be too large for 62 bits. */
static __always_inline s32 nicps_shift_of(u32 width, s32 exponent)
{
	return NICPS_WEIGHT_BITS - NICPS_PARAMETER_BITS + 32 - (s32)width - exponent;
}

static __always_inline struct nicps_scale nicps_scale_of(u64 weight, s64 down, s64 keep)
{
	struct nicps_scale scale = {
		.weight = weight,
		.keep = keep,
	};

	down += (63 - down) & nicps_less(63, down);
	scale.down = down & 63;
	scale.half = 1ULL << scale.down >> 1;
	return scale;
}

/* One lane, at the top of 32 bits; returns the magnitude of its parameter afterwards. */
static __always_inline u64 nicps_step(s64 *parameter, s64 lane,
				      const struct nicps_scale *how)
{
	s64 sum = *parameter & how->keep;

	sum += (lane * how->weight + how->half) >> how->down;
	*parameter = sum;
	return sum ^ sum >> 63;
}

static __always_inline u64 nicps_step_32(s64 *parameter, const void *lanes,
					 const struct nicps_scale *how)
{
	const u64 *in = lanes;
	u64 all = 0;

#pragma clang loop unroll_count(4)
	for (int i = 0; i < NICPS_WORDS; i++) {
		u64 two = __be64_to_cpu(in[i]);

		all |= nicps_step(&parameter[2 * i], (s64)(two & NICPS_TOP_32) >> 32,
				  how);
		all |= nicps_step(&parameter[2 * i + 1], (s64)(two << 32) >> 32, how);
	}
	return all;
}

static __always_inline u64 nicps_step_16(s64 *parameter, const void *lanes,
					 const struct nicps_scale *how)
{
	const u64 *in = lanes;
	u64 all = 0;

#pragma clang loop unroll_count(4)
	for (int i = 0; i < NICPS_WORDS; i++) {
		u64 four = __be64_to_cpu(in[i]);

		all |= nicps_step(&parameter[4 * i], (s64)(four & NICPS_TOP_16) >> 32,
				  how);
		all |= nicps_step(&parameter[4 * i + 1],
				  (s64)(four << 16 & NICPS_TOP_16) >> 32, how);
		all |= nicps_step(&parameter[4 * i + 2],
				  (s64)(four << 32 & NICPS_TOP_16) >> 32, how);
		all |= nicps_step(&parameter[4 * i + 3], (s64)(four << 48) >> 32, how);
	}
	return all;
}

static __always_inline u64 nicps_step_8(s64 *parameter, const void *lanes,
					const struct nicps_scale *how)
{
	const u8 *in = lanes;
	u64 all = 0;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_LANES_8; i++)
		all |= nicps_step(&parameter[i], (s64)((u64)in[i] << 56) >> 32, how);
	return all;
}

/* Where a push fragment's parameters begin in their block. The masks are there for the verifier. */
static __always_inline s64 *nicps_lanes_in(struct nicps_block *block, u32 part,
					   u32 width)
{
	s64 *lane = (s64 *)block;

	if (width == 32)
		lane += (part & 3) * NICPS_LANES_32;
	else if (width == 16)
		lane += (part & 1) * NICPS_LANES_16;
	return lane;
}

/* Add a fragment of a step; returns the OR of the parameters' magnitudes afterwards. */
static __always_inline u64 nicps_add_step(struct nicps_block *block, u32 part,
					  u32 width, const void *lanes,
					  const struct nicps_scale *how)
{
	s64 *parameter = nicps_lanes_in(block, part, width);

	if (width == 32)
		return nicps_step_32(parameter, lanes, how);
	if (width == 16)
		return nicps_step_16(parameter, lanes, how);
	return nicps_step_8(parameter, lanes, how);
}

static __always_inline u64 nicps_add_sums(s64 *parameter, const s64 *sum, u32 lanes)
{
	u64 all = 0;

#pragma clang loop unroll_count(8)
	for (u32 i = 0; i < lanes; i++) {
		s64 now = parameter[i] + sum[i];

		parameter[i] = now;
		all |= now ^ now >> 63;
	}
	return all;
}

/* Add the result of a synchronisation; as nicps_add_step. */
static __always_inline u64 nicps_add_average(struct nicps_block *block,
					     struct nicps_block *sums, u32 part,
					     u32 width)
{
	s64 *parameter = nicps_lanes_in(block, part, width);
	s64 *sum = nicps_lanes_in(sums, part, width);

	if (width == 32)
		return nicps_add_sums(parameter, sum, NICPS_LANES_32);
	if (width == 16)
		return nicps_add_sums(parameter, sum, NICPS_LANES_16);
	return nicps_add_sums(parameter, sum, NICPS_LANES_8);
}

/* Parameters as lanes of 32 bits, and their exponent. They stay as they are. */
static __always_inline s32 nicps_show(const s64 *parameter, u64 magnitudes, void *lanes)
{
	struct nicps_rounding how =
		nicps_rounding_of(magnitudes, 32, -NICPS_PARAMETER_BITS, 0);
	u64 *out = lanes;

#pragma clang loop unroll_count(4)
	for (int i = 0; i < NICPS_WORDS; i++) {
		u64 high = nicps_lane_of(parameter[2 * i], &how);
		u64 low = nicps_lane_of(parameter[2 * i + 1], &how);

		out[i] = __cpu_to_be64(high << 32 | (u32)low);
	}
	return how.exponent;
}

#endif /* NICPS_SCALE_H */
