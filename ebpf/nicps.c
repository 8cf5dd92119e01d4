// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The programs of nicps. nicps_xdp recognises our frames, drops those of
 * strangers (R4), forwards the token (R10) and adds gradients up (R11);
 * nicps_egress signs the frames that this host sends. All other frames pass
 * untouched.
 */
#include <uapi/linux/bpf.h>
#include "nicps_claim.h"
#include "nicps_maps.h"
#include "nicps_members.h"
#include "nicps_parse.h"

/* The rooms of the exchange and of direct calls, once they are loaded: the verifier walks each program alone. */
BPF_PROG_ARRAY(nicps_rooms, 2);

#include "nicps_direct.h"
#include "nicps_fragment.h"
#include "nicps_stripes.h"
#include "nicps_token.h"
#include "nicps_vlan.h"

/* Whether a switch adds the fragments of that round, and hosts take its sums. */
static __always_inline bool nicps_sums(const struct nicps_config *config, u32 round)
{
	return round > config->round ? config->sums_next : config->sums;
}

/* A token or a fragment: only of a member, in the view in force; or the switch's sum. */
static __always_inline int nicps_ring_frame(struct xdp_md *ctx,
					    struct nicps_cursor *cursor,
					    struct ethhdr *ethernet,
					    struct nicps_header *header,
					    const struct nicps_config *config)
{
	struct nicps_sender sender = nicps_sender_of(header);
	struct nicps_member *member;
	bool sum;

	if (!config->enabled)
		return nicps_drop(NICPS_COUNT_DISABLED);
	if (sender.view != config->view)
		return nicps_drop(NICPS_COUNT_VIEW);
	if (sender.number == config->number)
		return nicps_drop(NICPS_COUNT_ECHO);
	sum = header->type == NICPS_TYPE_FRAGMENT && sender.flags & NICPS_FLAG_ADD &&
	      sender.number == 0;
	member = sum ? nicps_member(0) : nicps_live(config, sender.number);
	if (!member || !nicps_same_mac(member->mac, ethernet->h_source))
		return nicps_drop(NICPS_COUNT_STRANGER);
	if (header->type == NICPS_TYPE_TOKEN)
		return nicps_pass_on(ctx, cursor, ethernet, header, &sender, config);
	if (sum != nicps_sums(config, sender.round) ||
	    nicps_aggregators(config, sender.round > config->round))
		return nicps_drop(NICPS_COUNT_MODE);
	return nicps_take_in(cursor, header, &sender, config);
}

/*
 * A question goes up. A train is many frames at the line's rate: they are
 * counted here and go no further. They have no tags: they can only spoil a
 * figure.
 */
static __always_inline int nicps_probe(struct nicps_cursor *cursor,
				       const struct ethhdr *ethernet,
				       const struct nicps_header *header,
				       const struct nicps_config *config)
{
	const struct nicps_probe *probe = nicps_take_probe(cursor);
	struct nicps_train *train = nicps_train();
	u64 now;

	if (!probe || bpf_ntohs(header->length) < sizeof(*header) + sizeof(*probe))
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (probe->step != NICPS_PROBE_STEP_TRAIN)
		return nicps_control(ethernet, header, config);
	if (train && __be64_to_cpu(probe->nonce) == train->nonce) {
		now = bpf_ktime_get_ns();
		if (!__sync_fetch_and_add(&train->count, 1))
			train->first_ns = now;
		train->last_ns = now;
	}
	return nicps_drop(NICPS_COUNT_PROBED);
}

/* A frame of ours, after its Ethernet header. */
static __always_inline int nicps_ours(struct xdp_md *ctx, struct nicps_cursor *cursor,
				      struct ethhdr *ethernet,
				      const struct nicps_config *config)
{
	u32 reason;
	struct nicps_header *header = nicps_open(cursor, config, &reason);

	if (!header)
		return nicps_drop(reason);
	switch (header->type) {
	case NICPS_TYPE_TOKEN:
	case NICPS_TYPE_FRAGMENT:
		return nicps_ring_frame(ctx, cursor, ethernet, header, config);
	case NICPS_TYPE_CONTRIBUTION:
	case NICPS_TYPE_SUM:
	case NICPS_TYPE_ASK:
	case NICPS_TYPE_LACKING:
	case NICPS_TYPE_PUSH:
	case NICPS_TYPE_PULL:
	case NICPS_TYPE_HELD:
	case NICPS_TYPE_TAKEN:
		nicps_rooms.call(ctx, NICPS_ROOM_EXCHANGE);
		return nicps_drop(NICPS_COUNT_MODE);
	case NICPS_TYPE_NUMBERS:
	case NICPS_TYPE_MARKED:
	case NICPS_TYPE_WITHDRAWN:
	case NICPS_TYPE_SETTLE:
		nicps_rooms.call(ctx, NICPS_ROOM_DIRECT);
		return nicps_drop(NICPS_COUNT_MODE);
	case NICPS_TYPE_CALL:
	case NICPS_TYPE_ANSWER:
	case NICPS_TYPE_VIEW:
	case NICPS_TYPE_DECISION:
	case NICPS_TYPE_ACK:
	case NICPS_TYPE_WANT:
	case NICPS_TYPE_FAIL:
	case NICPS_TYPE_VOTE:
	case NICPS_TYPE_LEAVE:
	case NICPS_TYPE_ECHO:
	case NICPS_TYPE_SWITCH:
	case NICPS_TYPE_SCRIPT:
		return nicps_control(ethernet, header, config);
	case NICPS_TYPE_PROBE:
		return nicps_probe(cursor, ethernet, header, config);
	default:
		return nicps_drop(NICPS_COUNT_TYPE);
	}
}

/*
 * The sender of a frame of stripes: a member that is in the view, or the switch
 * if it is the aggregator of that round. Else NULL. By arithmetic, as each
 * branch would be two ways for the verifier.
 */
static __always_inline struct nicps_member *
nicps_striping(const struct nicps_config *config, const struct nicps_channel *channel,
	       const struct nicps_sender *sender)
{
	struct nicps_member *member = nicps_member(sender->number);
	u64 is_member = -(u64)sender->number >> 63, believed;

	if (!member || sender->number > config->members || nicps_no_mac(member->mac))
		return NULL;
	believed = is_member | member->rank[sender->round > channel->round];
	asm volatile("" : "+r"(believed));
	return believed ? member : NULL;
}

/* Reached by a tail call from nicps_xdp: the frame is of stripes. */
static __always_inline int nicps_striped(struct nicps_cursor *cursor,
					 struct ethhdr *ethernet,
					 const struct nicps_config *config)
{
	struct nicps_sender sender;
	u32 reason;
	struct nicps_header *header =
		nicps_open_in_view(cursor, config, &sender, &reason);
	struct nicps_channel *channel;
	struct nicps_member *member;

	if (!header)
		return nicps_drop(reason);
	channel = nicps_channel(sender.channel);
	if (!channel || sender.channel >= config->channels)
		return nicps_drop(NICPS_COUNT_MODE);
	member = nicps_striping(config, channel, &sender);
	if (!member || !nicps_same_mac(member->mac, ethernet->h_source))
		return nicps_drop(NICPS_COUNT_STRANGER);
	return nicps_stripe_frame(cursor, ethernet, header, &sender, member, channel,
				  config);
}

/*
 * Seal a frame that goes up. Linux takes VLAN tags off after this program: a
 * frame behind one passes here as a frame of another protocol. The agent, which
 * believes frames that were checked here, must not take it for ours.
 */
static __always_inline int nicps_sealed(int verdict, struct ethhdr *ethernet,
					const struct nicps_config *config)
{
	if (verdict == XDP_PASS)
		__builtin_memcpy(ethernet->h_dest, config->seal, ETH_ALEN);
	return verdict;
}

/* Whether the frame is one of ours, with a tag or without. */
static __always_inline bool nicps_is_ours(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	const struct ethhdr *ethernet = nicps_take_ethernet(&cursor);

	if (!ethernet)
		return false;
	return ethernet->h_proto == bpf_htons(NICPS_ETHERTYPE) || nicps_untag(ctx);
}

int nicps_xdp(struct xdp_md *ctx)
{
	const struct nicps_config *config = nicps_config();
	struct nicps_cursor cursor;
	struct ethhdr *ethernet;
	int verdict;

	if (!nicps_is_ours(ctx))
		return XDP_PASS;
	/* Both ways are one from here on: the verifier walks what follows once. */
	cursor = nicps_cursor_of(ctx);
	ethernet = nicps_take_ethernet(&cursor);
	if (!ethernet)
		return XDP_PASS;
	if (!config)
		return nicps_drop(NICPS_COUNT_NETWORK);
	verdict = nicps_sealed(nicps_ours(ctx, &cursor, ethernet, config), ethernet,
			       config);
	return nicps_tag_out(ctx, verdict, NICPS_PRIORITY_CONTROL, config);
}

int nicps_stripes(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	const struct nicps_config *config = nicps_config();
	int verdict;

	if (!ethernet || !config)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	verdict = nicps_sealed(nicps_striped(&cursor, ethernet, config), ethernet,
			       config);
	return nicps_tag_out(ctx, verdict, nicps_priority(ctx), config);
}

/* Reached by a tail call from nicps_xdp: the frame is of a direct call. */
int nicps_direct(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	const struct nicps_config *config = nicps_config();
	const struct nicps_channel *channel;
	const struct nicps_member *member;
	struct nicps_header *header;
	struct nicps_sender sender;
	u32 reason;

	if (!ethernet || !config)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	header = nicps_open_in_view(&cursor, config, &sender, &reason);
	if (!header)
		return nicps_drop(reason);
	channel = nicps_channel(sender.channel);
	if (!channel || !channel->direct)
		return nicps_drop(NICPS_COUNT_MODE);
	member = nicps_live(config, sender.number);
	if (!member || !nicps_same_mac(member->mac, ethernet->h_source))
		return nicps_drop(NICPS_COUNT_STRANGER);
	return nicps_direct_frame(ctx, &cursor, ethernet, header, &sender, member->mac,
				  config);
}

/* At the interface that a training program writes to: nothing else comes from there. */
int nicps_confined(struct __sk_buff *skb)
{
	const struct nicps_config *config = nicps_config();

	if (config && nicps_confine(skb, config))
		return bpf_redirect(config->iface, 0);
	nicps_count(NICPS_COUNT_CONFINED);
	return TC_ACT_SHOT;
}

int nicps_egress(struct __sk_buff *skb)
{
	return nicps_sign(skb);
}
