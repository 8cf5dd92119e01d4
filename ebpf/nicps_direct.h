/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Direct calls (docs/direct.md): a training program sends its numbers itself,
 * and the kernels of all members store them, and say that they have all. Read
 * by the XDP program, for frames that come in, and by the TC program, for those
 * that go out.
 */
#ifndef NICPS_DIRECT_H
#define NICPS_DIRECT_H

#include "nicps_gather.h"
#include "nicps_vlan.h"

#define NICPS_NUMBERS_BYTES (sizeof(struct nicps_header) + sizeof(struct nicps_numbers))
#define NICPS_LONG_NUMBERS (NICPS_NUMBERS_BYTES + NICPS_PAYLOAD_BYTES)
#define NICPS_SHORT_NUMBERS (NICPS_NUMBERS_BYTES + NICPS_SHORT_BYTES)

/* What a frame has come to at the desk; `verdict` is that which it is answered with, or 0. */
struct nicps_ruling {
	u32 verdict;
	int reason;
	bool marked; /* just now: all are told */
	bool wakes;
};

static __always_inline u64 nicps_call_tag(const struct nicps_header *header,
					  const struct nicps_numbers *body)
{
	return (u64)bpf_ntohl(header->round) << 32 | bpf_ntohl(body->number);
}

static __always_inline struct nicps_desk *
nicps_desk_of(u32 channel, const struct nicps_numbers *body)
{
	return nicps_desk(channel, bpf_ntohl(body->number) & 1);
}

static __always_inline bool nicps_is_at(const struct nicps_desk *desk, u32 view,
					u64 tag)
{
	return desk->view == view && desk->tag == tag;
}

/*
 * Open a claimed desk for that call, unless it is; false: a later call is there.
 * A call that this host has marked may be settled yet: in a later view only its
 * own program gives it up.
 */
static __always_inline bool nicps_open_desk(struct nicps_desk *desk, u32 view, u64 tag,
					    bool own)
{
	if (nicps_is_at(desk, view, tag))
		return true;
	if (desk->view > view || (desk->view == view && desk->tag > tag))
		return false;
	if (!own && desk->view != view && desk->tag == tag &&
	    desk->verdict == NICPS_MARKED)
		return false;
	/* First the marks: without them no call is complete for the program. */
	nicps_publish(&desk->marks, 0);
	nicps_publish(&desk->agreed, 0);
	desk->here = 0;
	desk->gone = 0;
	desk->own = 0;
	desk->verdict = 0;
	desk->view = view;
	desk->agreed_view = 0;
#pragma clang loop unroll(full)
	for (u32 i = 0; i < NICPS_DESK_MEMBERS; i++)
		desk->have[i] = 0;
	nicps_publish(&desk->tag, tag);
	return true;
}

/* This host marks the call, if its own numbers are out and those of all others are here. */
static __always_inline bool nicps_rule(struct nicps_desk *desk,
				       const struct nicps_config *config)
{
	u64 me = nicps_bit(config->number), others = config->live_members & ~me;

	if (!desk->own || desk->verdict || desk->gone ||
	    (desk->here & others) != others)
		return false;
	desk->verdict = NICPS_MARKED;
	nicps_publish(&desk->marks, desk->marks | me);
	return true;
}

static __always_inline bool nicps_is_complete(const struct nicps_desk *desk,
					      const struct nicps_config *config)
{
	u64 all = config->live_members;

	return desk->own && (desk->marks & all) == all;
}

/* A fragment of a member's numbers comes to the claimed desk. */
static __always_inline int nicps_put_numbers(struct nicps_desk *desk,
					     const struct nicps_numbers *body,
					     const void *payload, bool is_long,
					     const struct nicps_sender *sender)
{
	u32 member = (sender->number - 1) & (NICPS_DESK_MEMBERS - 1);
	u32 index = body->index & (NICPS_DESK_FRAGMENTS - 1);
	struct nicps_numbers_of *place = nicps_numbers_of(
		sender->channel, bpf_ntohl(body->number) & 1, member, index);
	u32 call = bpf_ntohl(body->call), size = bpf_ntohs(body->size);

	if (!place)
		return NICPS_COUNT_RANGE;
	if (!desk->have[member]) {
		desk->call[member] = call;
		desk->size[member] = size;
		desk->parts[member] = body->fragments;
	} else if (desk->call[member] != call || desk->size[member] != size ||
		   desk->parts[member] != body->fragments) {
		return NICPS_COUNT_MALFORMED;
	}
	if (desk->have[member] >> index & 1)
		return NICPS_COUNT_DUPLICATE;
	if (is_long)
		nicps_copy_lanes(place->byte, payload);
	else
		__builtin_memcpy(place->byte, payload, NICPS_SHORT_BYTES);
	desk->have[member] |= 1U << index;
	if (desk->have[member] == (1U << (body->fragments & 7)) - 1)
		desk->here |= nicps_bit(sender->number);
	return NICPS_COUNT_DIRECT;
}

/* Numbers, a mark or a withdrawal of a call of this view come to the claimed desk. */
static __always_inline void
nicps_enter_others(struct nicps_desk *desk, const struct nicps_header *header,
		   const struct nicps_numbers *body, void *payload, const void *end,
		   const struct nicps_sender *sender, const struct nicps_config *config,
		   struct nicps_ruling *ruling)
{
	u64 from = nicps_bit(sender->number);
	bool was = nicps_is_complete(desk, config);

	if (header->type == NICPS_TYPE_NUMBERS) {
		if (sender->length == NICPS_LONG_NUMBERS)
			ruling->reason = payload + NICPS_PAYLOAD_BYTES > end
						 ? NICPS_COUNT_TRUNCATED
						 : nicps_put_numbers(desk, body,
								     payload, true,
								     sender);
		else
			ruling->reason = payload + NICPS_SHORT_BYTES > end
						 ? NICPS_COUNT_TRUNCATED
						 : nicps_put_numbers(desk, body,
								     payload, false,
								     sender);
	}
	if (header->type == NICPS_TYPE_WITHDRAWN) {
		ruling->wakes = !desk->gone;
		nicps_publish(&desk->gone, desk->gone | from);
	} else if (header->type == NICPS_TYPE_MARKED ||
		   sender->flags & NICPS_FLAG_COMPLETE) {
		nicps_publish(&desk->marks, desk->marks | from);
	}
	ruling->marked = nicps_rule(desk, config);
	ruling->wakes |= !was && nicps_is_complete(desk, config);
	/* Nothing else asks: two that answer each other's withdrawals would never end. */
	if (header->type == NICPS_TYPE_NUMBERS &&
	    (desk->verdict == NICPS_WITHDRAWN || sender->flags & NICPS_FLAG_REPEAT))
		ruling->verdict = desk->verdict;
}

/*
 * A question about a call of an earlier view, or an answer. A call that this
 * host has not marked until now it never marks.
 */
static __always_inline void
nicps_settle(struct nicps_desk *desk, const struct nicps_header *header,
	     const struct nicps_numbers *body, const struct nicps_sender *sender,
	     const struct nicps_config *config, struct nicps_ruling *ruling)
{
	bool at =
		nicps_is_at(desk, bpf_ntohl(body->view), nicps_call_tag(header, body));
	u64 from = nicps_bit(sender->number);

	if (header->type == NICPS_TYPE_SETTLE) {
		if (at && !desk->verdict)
			desk->verdict = NICPS_WITHDRAWN;
		ruling->verdict = at && desk->verdict == NICPS_MARKED && !desk->gone
					  ? NICPS_MARKED
					  : NICPS_WITHDRAWN;
		return;
	}
	if (!at)
		return;
	if (header->type == NICPS_TYPE_WITHDRAWN) {
		nicps_publish(&desk->gone, desk->gone | from);
	} else if (header->type == NICPS_TYPE_MARKED) {
		if (desk->agreed_view != config->view)
			nicps_publish(&desk->agreed, 0);
		desk->agreed_view = config->view;
		nicps_publish(&desk->agreed, desk->agreed | from);
	}
	ruling->wakes = true;
}

/* Turn the frame into this host's MARKED or WITHDRAWN. */
static __always_inline int nicps_say(struct xdp_md *ctx, u32 verdict,
				     const u8 *destination,
				     const struct nicps_config *config)
{
	u8 type = verdict == NICPS_MARKED ? NICPS_TYPE_MARKED : NICPS_TYPE_WITHDRAWN;
	int answer = nicps_answer_short(ctx, type, NICPS_NUMBERS_BYTES, destination,
					config->number, config->keyed);

	if (answer == XDP_TX)
		nicps_count(NICPS_COUNT_ANSWERED);
	return nicps_tag_out(ctx, answer, nicps_priority(ctx), config);
}

/* Whether the frame has the shape of its type. */
static __always_inline bool nicps_is_call(const struct nicps_header *header,
					  const struct nicps_numbers *body, u32 length)
{
	if (header->type != NICPS_TYPE_NUMBERS)
		return length == NICPS_NUMBERS_BYTES;
	return body->fragments - 1U < NICPS_DESK_FRAGMENTS &&
	       body->index < body->fragments &&
	       (length == NICPS_LONG_NUMBERS || length == NICPS_SHORT_NUMBERS);
}

/* In a keyed network: in another view frames have other numbers, and none of them was answered. */
static __always_inline void nicps_forget_answers(struct nicps_desk *desk, u32 view)
{
	if (desk->repeated_view == view)
		return;
#pragma clang loop unroll(full)
	for (u32 i = 0; i < 2 * NICPS_DESK_MEMBERS; i++)
		desk->repeated[i] = 0;
	desk->repeated_view = view;
}

/* In a keyed network: whether this very frame was not answered before. */
static __always_inline bool nicps_answers_once(struct nicps_desk *desk,
					       const struct nicps_sender *sender,
					       const struct nicps_config *config)
{
	u32 way = (sender->number - 1) & (NICPS_DESK_MEMBERS - 1);

	way = 2 * way + !!(sender->flags & NICPS_FLAG_ANSWER);
	return !config->keyed ||
	       nicps_unanswered(&desk->repeated[way], sender->sequence);
}

/* A frame of a direct call, of a member in the view that is in force. */
static __always_inline int
nicps_direct_frame(struct xdp_md *ctx, struct nicps_cursor *cursor,
		   struct ethhdr *ethernet, struct nicps_header *header,
		   const struct nicps_sender *sender, const u8 *mac,
		   const struct nicps_config *config)
{
	struct nicps_numbers *body = nicps_take_numbers(cursor);
	struct nicps_window *window = nicps_window(sender->channel, sender->number);
	struct nicps_ruling ruling = {.reason = NICPS_COUNT_DIRECT};
	void *payload = cursor->at;
	struct nicps_desk *desk;
	u32 view;
	bool now;
	int reason;

	if (!body || !window)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (sender->number - 1 >= NICPS_DESK_MEMBERS)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (!nicps_is_call(header, body, sender->length))
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (config->keyed) {
		reason = nicps_doubt_striped(0, header, sender, window, cursor->end);
		if (reason != NICPS_BELIEVED)
			return nicps_drop(reason);
	}
	view = bpf_ntohl(body->view);
	now = view == config->view;
	if (view > config->view ||
	    header->type == (now ? NICPS_TYPE_SETTLE : NICPS_TYPE_NUMBERS))
		return nicps_drop(NICPS_COUNT_VIEW);
	desk = nicps_desk_of(sender->channel, body);
	if (!desk || !nicps_claim_soon(&desk->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	nicps_forget_answers(desk, config->view);
	if (!now)
		nicps_settle(desk, header, body, sender, config, &ruling);
	else if (nicps_open_desk(desk, view, nicps_call_tag(header, body), false))
		nicps_enter_others(desk, header, body, payload, cursor->end, sender,
				   config, &ruling);
	else
		ruling.reason = NICPS_COUNT_ROUND;
	nicps_release(&desk->claim);
	if (ruling.wakes)
		nicps_wake_program(sender->channel);
	if (ruling.marked)
		return nicps_say(ctx, NICPS_MARKED, config->everybody, config);
	if (ruling.verdict && nicps_answers_once(desk, sender, config))
		return nicps_say(ctx, ruling.verdict, mac, config);
	return nicps_drop(ruling.reason);
}

/* A frame that a training program sends comes to the desk; whether it may go out. */
static __always_inline bool nicps_enter_own(struct nicps_header *header,
					    const struct nicps_numbers *body,
					    u32 channel,
					    const struct nicps_config *config)
{
	struct nicps_desk *desk = nicps_desk_of(channel, body);
	u64 tag = nicps_call_tag(header, body);
	u32 view = bpf_ntohl(body->view);
	bool passes = false;

	if (header->type == NICPS_TYPE_SETTLE)
		return view < config->view;
	if (view != config->view || !desk || !nicps_claim_soon(&desk->claim))
		return false;
	if (!nicps_open_desk(desk, view, tag, true))
		goto release;
	if (header->type == NICPS_TYPE_NUMBERS) {
		if (body->index + 1 == body->fragments)
			desk->own = 1;
		nicps_rule(desk, config);
		passes = desk->verdict != NICPS_WITHDRAWN;
		if (desk->verdict == NICPS_MARKED)
			header->flags |= bpf_htons(NICPS_FLAG_COMPLETE);
	} else {
		if (!desk->verdict)
			desk->verdict = NICPS_WITHDRAWN;
		passes = desk->verdict == NICPS_WITHDRAWN;
	}
release:
	nicps_release(&desk->claim);
	return passes;
}

static __always_inline bool nicps_sign_direct(struct nicps_header *header, u32 length,
					      const void *end)
{
	struct nicps_outgoing *outgoing = nicps_outgoing();
	const struct nicps_key *key = nicps_key();
	__be64 tag;

	if (!outgoing || !key || !nicps_number(header, &outgoing->sequence) ||
	    !nicps_frame_tag(key, header, end, length, &tag))
		return false;
	header->tag = tag;
	return true;
}

/*
 * A frame that a training program has written to its interface: only of a
 * direct call, and as this host's. Returns whether it may leave.
 */
static __always_inline bool nicps_confine(struct __sk_buff *skb,
					  const struct nicps_config *config)
{
	struct nicps_limit *limit = nicps_limit(NICPS_PROGRAM);
	const struct nicps_channel *channel;
	struct nicps_header *header;
	struct nicps_numbers *body;
	struct nicps_cursor cursor;
	struct nicps_member *me;
	struct ethhdr *ethernet;
	u32 length = skb->len - ETH_HLEN, number;

	if (!config->enabled || config->number - 1 >= NICPS_DESK_MEMBERS || !limit ||
	    skb->vlan_present ||
	    !nicps_admit(&limit->due_ns, NICPS_SECOND_NS / NICPS_DIRECT_RATE) ||
	    bpf_skb_pull_data(skb, skb->len))
		return false;
	me = nicps_member(config->number);
	cursor.at = (void *)(long)skb->data;
	cursor.end = (void *)(long)skb->data_end;
	ethernet = nicps_take_ethernet(&cursor);
	header = nicps_take_header(&cursor);
	body = nicps_take_numbers(&cursor);
	if (!ethernet || !header || !body || !me ||
	    ethernet->h_proto != bpf_htons(NICPS_ETHERTYPE))
		return false;
	if ((header->type != NICPS_TYPE_NUMBERS &&
	     header->type != NICPS_TYPE_WITHDRAWN &&
	     header->type != NICPS_TYPE_SETTLE) ||
	    !nicps_is_call(header, body, length))
		return false;
	number = nicps_bounded(header->flags) >> NICPS_CHANNEL_SHIFT;
	channel = nicps_channel(number);
	if (!channel || !channel->direct)
		return false;
	header->version = NICPS_VERSION;
	header->flags &= bpf_htons(NICPS_FLAG_REPEAT | NICPS_CHANNEL_MASK);
	header->network = bpf_htonl(config->network);
	header->view = bpf_htonl(config->view);
	header->sender = bpf_htons(config->number);
	header->length = bpf_htons(length);
	header->sequence = 0;
	header->tag = 0;
	__builtin_memcpy(ethernet->h_dest, config->everybody, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, me->mac, ETH_ALEN);
	if (!nicps_enter_own(header, body, number, config))
		return false;
	if (config->keyed && !nicps_sign_direct(header, length, cursor.end))
		return false;
	skb->priority = channel->queue;
	if (config->tags)
		bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q),
				  channel->priority << NICPS_PRIORITY_SHIFT);
	return true;
}

#endif /* NICPS_DIRECT_H */
