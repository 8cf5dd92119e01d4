// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The XDP program of nicps: recognises our frames, keeps strangers out (R4),
 * hands the token on (R10) and adds gradients up (R11). Whatever is not ours
 * passes untouched.
 */
#include <uapi/linux/bpf.h>
#include "nicps_maps.h"
#include "nicps_parse.h"

static __always_inline int nicps_drop(u32 reason)
{
	nicps_count(reason);
	return XDP_DROP;
}

#include "nicps_fragment.h"
#include "nicps_token.h"

/* A token or a fragment: only of a member, in the view that is in force. */
static __always_inline int nicps_ring_frame(struct xdp_md *ctx,
					    struct nicps_cursor *cursor,
					    struct ethhdr *ethernet,
					    struct nicps_header *header,
					    const struct nicps_config *config)
{
	struct nicps_sender sender = nicps_sender_of(header);
	struct nicps_member *member;
	struct nicps_ring *ring;

	if (!config->enabled)
		return nicps_drop(NICPS_COUNT_DISABLED);
	if (sender.view != config->view)
		return nicps_drop(NICPS_COUNT_VIEW);
	if (sender.number == config->number)
		return nicps_drop(NICPS_COUNT_ECHO);
	member = nicps_member(sender.number);
	if (!member || sender.number == 0 || sender.number > config->members ||
	    !nicps_same_mac(member->mac, ethernet->h_source))
		return nicps_drop(NICPS_COUNT_STRANGER);
	if (header->type == NICPS_TYPE_TOKEN)
		return nicps_pass_on(ctx, cursor, ethernet, header, &sender, config);
	ring = nicps_ring();
	if (ring)
		ring->heard_ns = bpf_ktime_get_coarse_ns();
	return nicps_take_in(cursor, &sender, config);
}

static __always_inline int nicps_frame(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = {
		.at = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
	};
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	struct nicps_config *config;
	struct nicps_header *header;
	u32 length;

	if (!ethernet || ethernet->h_proto != bpf_htons(NICPS_ETHERTYPE))
		return XDP_PASS;
	header = nicps_take_header(&cursor);
	if (!header)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (header->version != NICPS_VERSION)
		return nicps_drop(NICPS_COUNT_VERSION);
	length = bpf_ntohs(header->length);
	if (length < sizeof(*header) || (void *)header + length > cursor.end)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	config = nicps_config();
	if (!config || bpf_ntohl(header->network) != config->network)
		return nicps_drop(NICPS_COUNT_NETWORK);

	switch (header->type) {
	case NICPS_TYPE_TOKEN:
	case NICPS_TYPE_FRAGMENT:
		return nicps_ring_frame(ctx, &cursor, ethernet, header, config);
	case NICPS_TYPE_CALL:
	case NICPS_TYPE_ANSWER:
	case NICPS_TYPE_FORMED:
	case NICPS_TYPE_DECISION:
	case NICPS_TYPE_ACK:
	case NICPS_TYPE_WANT:
	case NICPS_TYPE_FAIL:
		nicps_count(NICPS_COUNT_CONTROL);
		return XDP_PASS;
	default:
		return nicps_drop(NICPS_COUNT_TYPE);
	}
}

int nicps_xdp(struct xdp_md *ctx)
{
	return nicps_frame(ctx);
}
