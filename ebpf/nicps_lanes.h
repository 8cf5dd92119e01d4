/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Adding a fragment's lanes into 64-bit accumulators. Read by BPF programs.
 *
 * `first` is a constant in every call: the slot's first fragment is stored, so
 * that nobody has to clear accumulators. A lane is brought to the top of 64
 * bits and shifted down again: that extends its sign and applies its scale at
 * once. The shift is under its limit (NICPS_MAX_SHIFT_*), so nothing is lost
 * at the top, not even when 64 members add up.
 *
 * Loops are unrolled in part: the verifier walks every turn of them, and a
 * full unrolling would not fit the processor's instruction cache.
 */
#ifndef NICPS_LANES_H
#define NICPS_LANES_H

#include "include/nicps_wire.h"

#define NICPS_LANES_32 (NICPS_PAYLOAD_BYTES / 4)
#define NICPS_LANES_16 (NICPS_PAYLOAD_BYTES / 2)
#define NICPS_LANES_8 NICPS_PAYLOAD_BYTES
#define NICPS_WORDS (NICPS_PAYLOAD_BYTES / 8)

static __always_inline void nicps_put(s64 *lane, s64 value, bool first)
{
	*lane = first ? value : *lane + value;
}

static __always_inline void nicps_put_32(s64 *lane, const void *payload, u32 shift,
					 bool first)
{
	const __be32 *in = payload;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_LANES_32; i++)
		nicps_put(&lane[i], (s64)((u64)bpf_ntohl(in[i]) << 32) >> (32 - shift),
			  first);
}

static __always_inline void nicps_put_16(s64 *lane, const void *payload, u32 shift,
					 bool first)
{
	const __be16 *in = payload;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_LANES_16; i++)
		nicps_put(&lane[i], (s64)((u64)bpf_ntohs(in[i]) << 48) >> (48 - shift),
			  first);
}

static __always_inline void nicps_put_8(s64 *lane, const void *payload, u32 shift,
					bool first)
{
	const u8 *in = payload;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_LANES_8; i++)
		nicps_put(&lane[i], (s64)((u64)in[i] << 56) >> (56 - shift), first);
}

static __always_inline void nicps_put_raw(u64 *word, const void *payload)
{
	const u64 *in = payload;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < NICPS_WORDS; i++)
		word[i] = in[i];
}

#endif /* NICPS_LANES_H */
