/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * A cursor over the frame: every step is checked against the frame's end, as
 * the verifier requires. Read by BPF programs.
 */
#ifndef NICPS_PARSE_H
#define NICPS_PARSE_H

#include <uapi/linux/if_ether.h>
#include "include/nicps_wire.h"

struct nicps_cursor {
	void *at;
	void *end;
};

static __always_inline struct nicps_cursor nicps_cursor_of(const struct xdp_md *ctx)
{
	struct nicps_cursor cursor = {
		.at = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
	};

	return cursor;
}

/*
 * Sixteen bits of the wire. Up to Linux 6.1 the verifier takes a number with
 * swapped bytes for an unbounded one, and LLVM drops a mask in C.
 */
static __always_inline u32 nicps_bounded(__be16 value)
{
	u64 number = bpf_ntohs(value);

	asm volatile("%0 &= 0xffff" : "+r"(number));
	return number;
}

/*
 * The next `size` bytes, or NULL if the frame ends before them; the cursor is
 * behind its end then, and takes no more. It moves in both cases: otherwise
 * LLVM tests the bound a second time, and each frame part doubles the
 * verifier's work.
 */
static __always_inline void *nicps_take(struct nicps_cursor *cursor, u64 size)
{
	void *taken = cursor->at;

	cursor->at = taken + size;
	if (cursor->at > cursor->end)
		taken = NULL;
	/* Otherwise LLVM tests the bound again in place of NULL: the verifier has forgotten it. */
	asm volatile("" : "+r"(taken));
	return taken;
}

static __always_inline struct ethhdr *nicps_take_ethernet(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct ethhdr));
}

static __always_inline struct nicps_header *
nicps_take_header(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_header));
}

static __always_inline struct nicps_fragment *
nicps_take_fragment(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_fragment));
}

static __always_inline struct nicps_contribution *
nicps_take_contribution(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_contribution));
}

static __always_inline struct nicps_numbers *
nicps_take_numbers(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_numbers));
}

static __always_inline struct nicps_push *nicps_take_push(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_push));
}

static __always_inline struct nicps_token *nicps_take_token(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_token));
}

static __always_inline struct nicps_probe *nicps_take_probe(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_probe));
}

/* Sixteen bits at a time: LLVM makes memcmp a call, which BPF does not have. */
static __always_inline bool nicps_same_mac(const u8 *one, const u8 *other)
{
	const u16 *a = (const u16 *)one, *b = (const u16 *)other;

	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

static __always_inline bool nicps_no_mac(const u8 *mac)
{
	const u16 *a = (const u16 *)mac;

	return (a[0] | a[1] | a[2]) == 0;
}

/* The header's fields in the processor's byte order: converted once, here. */
struct nicps_sender {
	u32 number;
	u32 view;
	u32 round;
	u32 sequence;
	u32 length;
	u32 channel;
	u16 flags;
};

static __always_inline struct nicps_sender
nicps_sender_of(const struct nicps_header *header)
{
	struct nicps_sender sender = {
		.number = bpf_ntohs(header->sender),
		.view = bpf_ntohl(header->view),
		.round = bpf_ntohl(header->round),
		.sequence = bpf_ntohl(header->sequence),
		.length = nicps_bounded(header->length),
		.channel = nicps_bounded(header->flags) >> NICPS_CHANNEL_SHIFT,
		.flags = bpf_ntohs(header->flags),
	};

	return sender;
}

#endif /* NICPS_PARSE_H */
