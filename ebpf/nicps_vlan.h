/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * 802.1p tags (docs/channels.md, "Order on the wire"): a hint for switches, from
 * which no receiver reads anything. One is taken off before a frame is looked
 * at, and put before a frame that this host sends. Read by the programs of a
 * host.
 */
#ifndef NICPS_VLAN_H
#define NICPS_VLAN_H

#include "nicps_maps.h"
#include "nicps_parse.h"

struct nicps_vlan {
	__be16 tci; /* priority in the upper three bits, a network's number in the lower twelve */
	__be16 proto;
};

/*
 * Both addresses of a frame, while its head moves. In two numbers, which stay in
 * registers: bytes on the stack would be part of the state in which the verifier
 * walks all that follows.
 */
struct nicps_macs {
	u64 first;
	u32 second;
};

#define NICPS_VLAN_ID 0x0fff
#define NICPS_PRIORITY_SHIFT 13

static __always_inline struct nicps_macs nicps_macs_of(const struct ethhdr *ethernet)
{
	const void *at = ethernet;
	struct nicps_macs macs = {
		.first = *(const u64 *)at,
		.second = *(const u32 *)(at + sizeof(u64)),
	};

	return macs;
}

static __always_inline void nicps_put_macs(struct ethhdr *ethernet,
					   struct nicps_macs macs)
{
	void *at = ethernet;

	*(u64 *)at = macs.first;
	*(u32 *)(at + sizeof(u64)) = macs.second;
}

static __always_inline struct nicps_vlan *nicps_take_vlan(struct nicps_cursor *cursor)
{
	return nicps_take(cursor, sizeof(struct nicps_vlan));
}

/* A tag of no network before a frame of ours; else NULL. */
static __always_inline struct nicps_vlan *nicps_our_tag(struct nicps_cursor *cursor,
							const struct ethhdr *ethernet)
{
	struct nicps_vlan *vlan = nicps_take_vlan(cursor);

	if (!vlan || ethernet->h_proto != bpf_htons(ETH_P_8021Q) ||
	    vlan->tci & bpf_htons(NICPS_VLAN_ID) ||
	    vlan->proto != bpf_htons(NICPS_ETHERTYPE))
		return NULL;
	return vlan;
}

/* `nicps doctor --network` asks whether tags arrive. */
static __always_inline void nicps_note_tagged(struct nicps_cursor cursor)
{
	const struct nicps_header *header = nicps_take_header(&cursor);
	const struct nicps_probe *probe = nicps_take_probe(&cursor);
	struct nicps_train *train = nicps_train();

	if (header && probe && train && header->type == NICPS_TYPE_PROBE &&
	    probe->step == NICPS_PROBE_STEP_TRAIN &&
	    __be64_to_cpu(probe->nonce) == train->nonce)
		__sync_fetch_and_add(&train->tagged, 1);
}

/*
 * Take our tag off; false: the frame has none of ours. All pointers into the
 * frame are void then.
 */
static __always_inline bool nicps_untag(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	struct nicps_macs macs;

	if (!ethernet || !nicps_our_tag(&cursor, ethernet))
		return false;
	nicps_note_tagged(cursor);
	macs = nicps_macs_of(ethernet);
	if (bpf_xdp_adjust_head(ctx, sizeof(struct nicps_vlan)))
		return false;
	cursor = nicps_cursor_of(ctx);
	ethernet = nicps_take_ethernet(&cursor);
	if (!ethernet)
		return false;
	nicps_put_macs(ethernet, macs);
	return true;
}

/* In the tag of a frame of stripes or servers: that of its channel. */
static __always_inline u32 nicps_priority(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	const struct nicps_header *header = nicps_take_header(&cursor);
	const struct nicps_channel *channel;

	if (!ethernet || !header)
		return 0;
	channel = nicps_channel(nicps_bounded(header->flags) >> NICPS_CHANNEL_SHIFT);
	return channel ? channel->priority : 0;
}

/* Put a tag before a frame that goes out, if this host does so. Without head room it goes out without. */
static __always_inline int nicps_tag_out(struct xdp_md *ctx, int verdict, u32 priority,
					 const struct nicps_config *config)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	struct nicps_vlan *vlan;
	struct nicps_macs macs;

	if (verdict != XDP_TX || !config->tags || !ethernet)
		return verdict;
	macs = nicps_macs_of(ethernet);
	if (bpf_xdp_adjust_head(ctx, -(int)sizeof(*vlan)))
		return verdict;
	cursor = nicps_cursor_of(ctx);
	ethernet = nicps_take_ethernet(&cursor);
	vlan = nicps_take_vlan(&cursor);
	if (!ethernet || !vlan)
		return XDP_DROP;
	nicps_put_macs(ethernet, macs);
	ethernet->h_proto = bpf_htons(ETH_P_8021Q);
	vlan->tci = bpf_htons(priority << NICPS_PRIORITY_SHIFT);
	vlan->proto = bpf_htons(NICPS_ETHERTYPE);
	return verdict;
}

#endif /* NICPS_VLAN_H */
