/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The way out: every token and fragment of this host gets the next number of
 * one counter and the tag. Read by the TC program, which signs frames of the
 * agent's sockets (their mark tells them from frames of other programs on the
 * interface), and by the XDP program, which signs the token that it forwards.
 */
#ifndef NICPS_SIGN_H
#define NICPS_SIGN_H

#include <uapi/linux/pkt_cls.h>
#include "nicps_auth.h"
#include "nicps_maps.h"
#include "nicps_parse.h"
#include "nicps_siphash.h"
#include "nicps_vlan.h"

static __always_inline bool nicps_numbers_left(void)
{
	struct nicps_outgoing *outgoing = nicps_outgoing();

	return outgoing && outgoing->sequence < NICPS_LAST_SEQUENCE;
}

/* Looked up in a mask that LLVM does not see: each comparison would be a path for the verifier. */
static __always_inline bool nicps_is_signed(u8 type)
{
	u64 types = 1ULL << NICPS_TYPE_TOKEN | 1ULL << NICPS_TYPE_FRAGMENT |
		    1ULL << NICPS_TYPE_CONTRIBUTION | 1ULL << NICPS_TYPE_SUM |
		    1ULL << NICPS_TYPE_ASK | 1ULL << NICPS_TYPE_LACKING |
		    1ULL << NICPS_TYPE_PUSH | 1ULL << NICPS_TYPE_PULL |
		    1ULL << NICPS_TYPE_HELD | 1ULL << NICPS_TYPE_TAKEN;

	asm volatile("" : "+r"(types));
	return type < 64 && types >> type & 1;
}

/* The frame's header lies there. A frame of a type that is not signed passes unchanged. */
static __always_inline int nicps_sign_at(struct nicps_cursor cursor,
					 const struct nicps_key *key,
					 struct nicps_outgoing *outgoing)
{
	struct nicps_header *header = nicps_take_header(&cursor);
	__be64 tag;

	if (!header || !nicps_is_signed(header->type))
		return TC_ACT_UNSPEC;
	if (!nicps_number(header, &outgoing->sequence)) {
		nicps_count(NICPS_COUNT_SPENT);
		return TC_ACT_SHOT;
	}
	if (!nicps_frame_tag(key, header, cursor.end, nicps_bounded(header->length),
			     &tag))
		return TC_ACT_UNSPEC;
	header->tag = tag;
	return TC_ACT_UNSPEC;
}

/* Other programs' frames pass unchanged. */
static __always_inline int nicps_sign(struct __sk_buff *skb)
{
	struct nicps_outgoing *outgoing = nicps_outgoing();
	const struct nicps_config *config = nicps_config();
	const struct nicps_key *key = nicps_key();
	struct nicps_cursor cursor;
	struct ethhdr *ethernet;

	if (skb->mark != NICPS_MARK || !config || !config->keyed || !key || !outgoing ||
	    bpf_skb_pull_data(skb, skb->len))
		return TC_ACT_UNSPEC;
	cursor.at = (void *)(long)skb->data;
	cursor.end = (void *)(long)skb->data_end;
	ethernet = nicps_take_ethernet(&cursor);
	if (!ethernet)
		return TC_ACT_UNSPEC;
	/* Twice the code, as the verifier walks one way with two distances many times. */
	if (ethernet->h_proto == bpf_htons(NICPS_ETHERTYPE))
		return nicps_sign_at(cursor, key, outgoing);
	if (nicps_our_tag(&cursor, ethernet))
		return nicps_sign_at(cursor, key, outgoing);
	return TC_ACT_UNSPEC;
}

#endif /* NICPS_SIGN_H */
