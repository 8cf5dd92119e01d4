/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * SipHash-2-4 (Aumasson and Bernstein, 2012) over a frame of ours. Read by BPF
 * programs.
 *
 * The message is the frame from the version byte to `length`, with zeros for
 * the tag; its length is a multiple of 4, as that of every token and fragment.
 * The tag is the 64-bit result, big-endian as all that is on the wire.
 *
 * Loops are unrolled in part: the verifier walks every turn of them.
 */
#ifndef NICPS_SIPHASH_H
#define NICPS_SIPHASH_H

#include "nicps_shared.h"
#include "include/nicps_wire.h"

#define NICPS_TAG_WORD 3 /* place of the tag, in words of 8 bytes */
#define NICPS_FRAGMENT_WORDS ((NICPS_FRAGMENT_HEADER_BYTES + NICPS_PAYLOAD_BYTES) / 8)
_Static_assert(offsetof(struct nicps_header, tag) == NICPS_TAG_WORD * 8,
	       "the tag moved");

struct nicps_sip {
	u64 v0, v1, v2, v3;
};

static __always_inline u64 nicps_rotate(u64 word, u32 bits)
{
	return word << bits | word >> (64 - bits);
}

static __always_inline void nicps_sip_round(struct nicps_sip *sip)
{
	sip->v0 += sip->v1;
	sip->v2 += sip->v3;
	sip->v1 = nicps_rotate(sip->v1, 13) ^ sip->v0;
	sip->v3 = nicps_rotate(sip->v3, 16) ^ sip->v2;
	sip->v0 = nicps_rotate(sip->v0, 32);
	sip->v2 += sip->v1;
	sip->v0 += sip->v3;
	sip->v1 = nicps_rotate(sip->v1, 17) ^ sip->v2;
	sip->v3 = nicps_rotate(sip->v3, 21) ^ sip->v0;
	sip->v2 = nicps_rotate(sip->v2, 32);
}

static __always_inline void nicps_sip_word(struct nicps_sip *sip, u64 word)
{
	sip->v3 ^= word;
	nicps_sip_round(sip);
	nicps_sip_round(sip);
	sip->v0 ^= word;
}

/* The key and the header; the caller adds the words behind it. */
static __always_inline struct nicps_sip nicps_sip_begin(const struct nicps_key *key,
							const __le64 *frame)
{
	struct nicps_sip sip = {
		.v0 = key->word[0] ^ 0x736f6d6570736575ULL,
		.v1 = key->word[1] ^ 0x646f72616e646f6dULL,
		.v2 = key->word[0] ^ 0x6c7967656e657261ULL,
		.v3 = key->word[1] ^ 0x7465646279746573ULL,
	};

	nicps_sip_word(&sip, __le64_to_cpu(frame[0]));
	nicps_sip_word(&sip, __le64_to_cpu(frame[1]));
	nicps_sip_word(&sip, __le64_to_cpu(frame[2]));
	nicps_sip_word(&sip, 0);
	return sip;
}

/* `rest` has the bytes behind the last whole word. */
static __always_inline __be64 nicps_sip_end(struct nicps_sip *sip, u32 length, u64 rest)
{
	nicps_sip_word(sip, rest | (u64)length << 56);
	sip->v2 ^= 0xff;
	nicps_sip_round(sip);
	nicps_sip_round(sip);
	nicps_sip_round(sip);
	nicps_sip_round(sip);
	return __cpu_to_be64(sip->v0 ^ sip->v1 ^ sip->v2 ^ sip->v3);
}

/* The tag of a frame of so many words, a constant; false if the frame is shorter. */
static __always_inline bool nicps_long_tag(const struct nicps_key *key,
					   const void *frame, const void *end,
					   u32 words, __be64 *tag)
{
	const __le64 *in = frame;
	struct nicps_sip sip;

	if ((void *)(in + words) > end)
		return false;
	sip = nicps_sip_begin(key, in);
#pragma clang loop unroll_count(6)
	for (u32 i = NICPS_TAG_WORD + 1; i < words; i++)
		nicps_sip_word(&sip, __le64_to_cpu(in[i]));
	*tag = nicps_sip_end(&sip, words * 8, 0);
	return true;
}

/*
 * The tag of a frame of any length. `zero` is 0, but the verifier does not know
 * that: so a turn learns about the frame's end through `at` alone. Otherwise
 * each exit of the loop is a state of its own for all code that follows.
 */
static __always_inline bool nicps_frame_tag(const struct nicps_key *key,
					    const void *frame, const void *end,
					    u32 length, __be64 *tag)
{
	const __le64 *at = frame;
	struct nicps_sip sip;
	u64 rest = 0;
	u32 zero = length;

	if ((void *)(at + NICPS_TAG_WORD + 1) > end)
		return false;
	sip = nicps_sip_begin(key, at);
	asm volatile("" : "+r"(zero));
	zero = (zero - length) & 0x7ff;
	asm volatile("" : "+r"(zero));
	at = frame + zero;
	at += NICPS_TAG_WORD + 1;
#pragma clang loop unroll(disable)
	for (u32 word = NICPS_TAG_WORD + 1; word < NICPS_MAX_FRAME_BYTES / 8; word++) {
		/*
		 * Otherwise the compiler takes the check of `end` out of the
		 * loop, or counts down to 0 from a number whose bound the
		 * verifier loses.
		 */
		asm volatile("" : "+r"(at), "+r"(word));
		if (word >= length / 8)
			break;
		if ((void *)(at + 1) > end)
			return false;
		nicps_sip_word(&sip, __le64_to_cpu(*at));
		at++;
	}
	if (length & 4) {
		if ((void *)at + 4 > end)
			return false;
		rest = __le32_to_cpu(*(const __le32 *)at);
	}
	*tag = nicps_sip_end(&sip, length, rest);
	return true;
}

#endif /* NICPS_SIPHASH_H */
