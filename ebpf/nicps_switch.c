// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The program of a Linux switch that adds (docs/linux-switch.md), on each port of
 * a bridge. It takes contributions to the switch's address, adds them, and
 * sends each sum to all ports; questions for sums go back out with their
 * answer. All other frames pass to the bridge untouched.
 *
 * The text on claims and tags in nicps_fragment.h holds here too. Each fragment
 * has two places, because the remainder of one sum is added to a later one. So
 * the former must stay until the later is made, however often that begins anew.
 * The claim of the first place holds for both.
 */
#include <uapi/linux/bpf.h>
#include "nicps_switch_maps.h"
#include "nicps_gather.h"

#define NICPS_THE_SWITCH 0 /* its number */

/*
 * A remainder is less than a power of two. The exponent of that power may be so
 * far above the unit that the lanes of so many members do not overflow 64 bits
 * with the remainder. See docs/linux-switch.md.
 */
#define NICPS_REST_ROOM 61
#define NICPS_FEW 32
#define NICPS_REST_ROOM_MANY 57

/* The outcome of a frame that is not dropped. */
#define NICPS_SEND_ALL -2
#define NICPS_SEND_BACK -3

/* Send a message to the control process, at most once for each value and not too often. */
static __always_inline void nicps_tell(u32 kind, u64 value, bool only_more,
				       struct nicps_message *message)
{
	struct nicps_told *told = nicps_told(kind);
	u64 before;

	if (!told)
		return;
	before = told->last;
	if (before == value || (only_more && before > value) ||
	    !nicps_admit(&told->due_ns, NICPS_SECOND_NS / NICPS_TOLD_RATE))
		return;
	if (__sync_val_compare_and_swap(&told->last, before, value) != before)
		return;
	message->kind = kind;
	if (nicps_wake(message)) /* no room: the next frame reports it */
		__sync_val_compare_and_swap(&told->last, value, before);
}

static __always_inline int nicps_too_long(u64 tag, u32 fragments)
{
	struct nicps_message message = {
		.tag = tag,
		.fragments = {0, fragments},
	};

	nicps_tell(NICPS_TOLD_ROOM, fragments, true, &message);
	return nicps_drop(NICPS_COUNT_RANGE);
}

static __always_inline int nicps_other_view(u64 tag, u32 reason)
{
	struct nicps_message message = {
		.tag = tag,
	};

	/* One bit more, since there is a view 0. */
	nicps_tell(NICPS_TOLD_VIEW, tag >> 32 | 1ULL << 32, false, &message);
	return nicps_drop(reason);
}

/* The caller holds the place's claim. */
static __always_inline void nicps_tell_difference(u64 tag, u32 sender,
						  const struct nicps_place *place,
						  const struct nicps_contribution *body)
{
	struct nicps_message message = {
		.tag = tag,
		.members = {place->members, __be64_to_cpu(body->members)},
		.fragments = {place->fragments, bpf_ntohl(body->fragments)},
		.number = {place->number, bpf_ntohl(body->number)},
		.index = bpf_ntohl(body->index),
		.sender = sender,
		.behind = {place->behind, body->behind},
		.unit = {place->unit, body->unit},
		.width = body->width,
	};

	nicps_tell(NICPS_TOLD_OTHER, tag, false, &message);
}

static __always_inline bool nicps_is_whole(const struct nicps_place *place)
{
	return place->seen == place->members;
}

/* The tag of the round whose remainder belongs to this one; 0: of none. */
static __always_inline u64 nicps_rest_tag(const struct nicps_contribution *body,
					  u32 round)
{
	u64 tag = (u64)bpf_ntohl(body->number) << 32 | (u32)(round - body->behind);

	return body->behind ? tag : 0;
}

/*
 * The place that a contribution with this tag goes to: the one that has it,
 * else the older one of those whose tag is less, but not the one whose
 * remainder is asked for. Below 0: none, as both are newer.
 */
static __always_inline int nicps_choose(u64 one, u64 other, u64 tag, u64 rest)
{
	bool first = one < tag && (!rest || one != rest);
	bool second = other < tag && (!rest || other != rest);

	if (one == tag)
		return 0;
	if (other == tag)
		return 1;
	if (first && second)
		return other < one;
	return first ? 0 : second ? 1 : -1;
}

/* How far above the unit a remainder's exponent may be; below 0: no remainder fits. */
static __always_inline s32 nicps_rest_room(u64 members)
{
	u32 count = nicps_ones(members);

	if (count >= NICPS_MAX_MEMBERS)
		return -1000;
	return count > NICPS_FEW ? NICPS_REST_ROOM_MANY : NICPS_REST_ROOM;
}

/* Add a remainder, in the units of another round, to this round's accumulators. */
static __always_inline void nicps_shift_lanes(s64 *to, const s64 *from, u32 lanes,
					      u32 left, u32 right)
{
#pragma clang loop unroll_count(8)
	for (u32 i = 0; i < lanes; i++)
		to[i] = (s64)((u64)from[i] << left) >> right;
}

static __always_inline void nicps_carry_lanes(struct nicps_block *to,
					      const struct nicps_block *from, u32 part,
					      u32 width, s32 up)
{
	s64 *sum = (s64 *)to;
	const s64 *rest = (const s64 *)from;
	s64 down = -(s64)up;
	u32 left = up & ~nicps_less(up, 0) & 63, right;

	down += (63 - down) & nicps_less(63, down);
	right = down & ~nicps_less(down, 0) & 63;
	if (width == 32) {
		sum += (part & 3) * NICPS_LANES_32;
		rest += (part & 3) * NICPS_LANES_32;
		nicps_shift_lanes(sum, rest, NICPS_LANES_32, left, right);
	} else if (width == 16) {
		sum += (part & 1) * NICPS_LANES_16;
		rest += (part & 1) * NICPS_LANES_16;
		nicps_shift_lanes(sum, rest, NICPS_LANES_16, left, right);
	} else {
		nicps_shift_lanes(sum, rest, NICPS_LANES_8, left, right);
	}
}

/*
 * Whether the remainder in `former` exists and can be added to a sum of that
 * list, unit and size. If it should be added, and cannot, that is counted. A
 * sum that is not finite has no remainder.
 */
static __always_inline bool nicps_has_rest(const struct nicps_place *former, u64 rest,
					   u64 members, u32 fragments, s32 unit)
{
	s32 exponent = (s8)former->exponent;

	if (!rest)
		return false;
	if (former->tag == rest && nicps_is_whole(former) &&
	    former->fragments == fragments) {
		if (exponent == NICPS_NOT_FINITE)
			return false;
		if (exponent - unit <= nicps_rest_room(members))
			return true;
	}
	nicps_count(NICPS_COUNT_LEFT_OUT);
	return false;
}

/* A contribution to a sum: a verdict, or NICPS_SEND_ALL with the sum in the frame. */
static __always_inline int nicps_add_in(struct nicps_header *header,
					struct nicps_contribution *body, void *payload,
					const struct nicps_sender *sender,
					const struct nicps_switch_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 members = __be64_to_cpu(body->members), bit = nicps_bit(sender->number);
	u64 rest = nicps_rest_tag(body, sender->round);
	u32 index = bpf_ntohl(body->index), fragments = bpf_ntohl(body->fragments);
	u32 width = config->width, part, number = bpf_ntohl(body->number);
	s32 unit = (s8)body->unit, exponent = (s8)body->exponent;
	struct nicps_place *first, *place, *former;
	struct nicps_block *block, *from;
	struct nicps_lanes *lanes;
	int reason = NICPS_BELIEVED, at = 0;
	bool fresh, carried;

	if (!(members & bit) || members & ~config->live_members ||
	    body->width != width || nicps_parts(width) < 0 || !width ||
	    (body->behind && (body->behind >= sender->round || rest >= tag)))
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (!nicps_fits(width, exponent, unit))
		return nicps_drop(NICPS_COUNT_SHIFT);
	if (fragments > config->room)
		return nicps_too_long(tag, fragments);
	if (index >= fragments)
		return nicps_drop(NICPS_COUNT_RANGE);
	first = nicps_place(index, 0);
	former = nicps_place(index, 1);
	if (!first || !former)
		return nicps_drop(NICPS_COUNT_RANGE);
	NICPS_STALL(CHECKED);
	if (!nicps_claim_soon(&first->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	NICPS_STALL(CLAIMED);

	at = nicps_choose(first->tag, former->tag, tag, rest);
	part = index & ((1 << nicps_parts(width)) - 1);
	place = nicps_place(index, at & 1);
	former = nicps_place(index, ~at & 1);
	block = nicps_place_block(index >> nicps_parts(width), at & 1);
	from = nicps_place_block(index >> nicps_parts(width), ~at & 1);
	lanes = nicps_lanes(index, at & 1);
	if (!place || !former || !block || !from || !lanes) {
		nicps_release(&first->claim);
		return nicps_drop(NICPS_COUNT_RANGE);
	}
	fresh = place->tag != tag;
	if (at < 0) {
		reason = NICPS_COUNT_ROUND;
	} else if (!fresh && place->seen & bit) {
		reason = NICPS_COUNT_DUPLICATE;
	} else if (!fresh &&
		   (place->members != members || place->unit != (u8)body->unit ||
		    place->fragments != fragments || place->number != number ||
		    place->behind != body->behind)) {
		reason = NICPS_COUNT_MALFORMED;
		nicps_tell_difference(tag, sender->number, place, body);
	}
	if (reason != NICPS_BELIEVED) {
		nicps_release(&first->claim);
		return nicps_drop(reason);
	}

	carried = fresh && nicps_has_rest(former, rest, members, fragments, unit);
	if (carried)
		nicps_carry_lanes(block, from, part, width, (s8)former->unit - unit);
	NICPS_STALL(COPIED);
	if (fresh) {
		place->members = members;
		place->fragments = fragments;
		place->number = number;
		place->behind = body->behind;
		place->unit = body->unit;
		place->not_finite = 0;
		place->seen = 0;
	}
	place->not_finite |= exponent == NICPS_NOT_FINITE;
	place->seen |= bit;
	place->last = nicps_is_whole(place);
	nicps_publish(&place->tag, tag);
	nicps_gather_lanes(block, part, width, payload,
			   nicps_down(width, exponent, unit), fresh && !carried);
	if (!*(volatile u8 *)&place->last) {
		nicps_release(&first->claim);
		nicps_count(NICPS_COUNT_GATHERED);
		return XDP_DROP;
	}
	exponent = nicps_make_sum(block, part, width, payload, unit,
				  *(volatile u8 *)&place->not_finite & 1);
	place->exponent = exponent;
	nicps_copy_lanes(lanes->lane, payload);
	nicps_release(&first->claim);
	NICPS_STALL(ADDED);
	nicps_count(NICPS_COUNT_SUMMED);
	header->type = NICPS_TYPE_SUM;
	body->exponent = exponent;
	body->number = 0;
	body->behind = 0;
	return NICPS_SEND_ALL;
}

/* A question: a verdict, or NICPS_SEND_BACK with the answer in the frame. */
static __always_inline int
nicps_answer_ask(struct nicps_header *header, struct nicps_contribution *body,
		 void *payload, const struct nicps_sender *sender,
		 struct nicps_window *window, const struct nicps_switch_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	u64 members = __be64_to_cpu(body->members);
	u32 index = bpf_ntohl(body->index), fragments = bpf_ntohl(body->fragments), at;
	struct nicps_place *first, *second, *place;
	struct nicps_lanes *lanes;
	int reason = NICPS_BELIEVED;
	bool known;

	if (!members || members & ~config->live_members || body->width != config->width)
		return nicps_drop(NICPS_COUNT_MALFORMED);
	if (fragments > config->room)
		return nicps_too_long(tag, fragments);
	if (index >= fragments)
		return nicps_drop(NICPS_COUNT_RANGE);
	first = nicps_place(index, 0);
	second = nicps_place(index, 1);
	if (!first || !second)
		return nicps_drop(NICPS_COUNT_RANGE);
	if (!nicps_claim_soon(&first->claim))
		return nicps_drop(NICPS_COUNT_BUSY);
	at = second->tag == tag;
	place = nicps_place(index, at);
	lanes = nicps_lanes(index, at);
	if (!place || !lanes) {
		nicps_release(&first->claim);
		return nicps_drop(NICPS_COUNT_RANGE);
	}
	known = place->tag == tag;
	if (!known && first->tag > tag && second->tag > tag)
		reason = NICPS_COUNT_ROUND;
	else if (known && (place->members != members || place->unit != (u8)body->unit ||
			   place->fragments != fragments))
		reason = NICPS_COUNT_MALFORMED;
	else if (!nicps_unanswered(&window->asked, bpf_ntohl(body->number)))
		reason = NICPS_COUNT_REPLAYED;
	if (reason != NICPS_BELIEVED) {
		nicps_release(&first->claim);
		return nicps_drop(reason);
	}
	if (known && nicps_is_whole(place)) {
		body->exponent = place->exponent;
		nicps_copy_lanes(payload, lanes->lane);
		header->type = NICPS_TYPE_SUM;
	} else {
		body->members = __cpu_to_be64(known ? members & ~place->seen : members);
		header->type = NICPS_TYPE_LACKING;
	}
	body->behind = 0;
	nicps_release(&first->claim);
	nicps_count(NICPS_COUNT_ANSWERED);
	return NICPS_SEND_BACK;
}

/* A contribution or a question, to the switch, in this network. */
static __always_inline int nicps_take_in(struct nicps_cursor *cursor,
					 struct nicps_header *header,
					 const struct nicps_sender *sender,
					 const struct ethhdr *ethernet,
					 const struct nicps_switch_config *config)
{
	u64 tag = (u64)sender->view << 32 | sender->round;
	struct nicps_contribution *body = nicps_take_contribution(cursor);
	void *payload = nicps_take(cursor, NICPS_PAYLOAD_BYTES);
	struct nicps_window *window = nicps_window(0, sender->number);
	struct nicps_member *member = nicps_member(sender->number);
	int reason;

	if (!body || !payload ||
	    sender->length != NICPS_CONTRIBUTION_HEADER_BYTES + NICPS_PAYLOAD_BYTES)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	if (!config->enabled)
		return nicps_other_view(tag, NICPS_COUNT_DISABLED);
	if (sender->view != config->view)
		return nicps_other_view(tag, NICPS_COUNT_VIEW);
	if (!member || !window || !(nicps_bit(sender->number) & config->live_members) ||
	    !nicps_same_mac(member->mac, ethernet->h_source))
		return nicps_drop(NICPS_COUNT_STRANGER);
	if (sender->channel) /* a switch has one */
		return nicps_drop(NICPS_COUNT_MODE);
	if (config->keyed) {
		reason = nicps_doubt_striped(NICPS_CONTRIBUTION_WORDS, header, sender,
					     window, cursor->end);
		if (reason != NICPS_BELIEVED)
			return nicps_drop(reason);
	}
	if (header->type == NICPS_TYPE_ASK)
		return nicps_answer_ask(header, body, payload, sender, window, config);
	return nicps_add_in(header, body, payload, sender, config);
}

/* The header of a contribution or question of this network to the switch, else NULL. */
static __always_inline struct nicps_header *
nicps_to_switch(struct nicps_cursor *cursor, const struct ethhdr *ethernet,
		const struct nicps_switch_config *config)
{
	struct nicps_header *header = nicps_take_header(cursor);
	struct nicps_member *me = nicps_member(NICPS_THE_SWITCH);

	if (!header || !me || header->version != NICPS_VERSION ||
	    !nicps_same_mac(ethernet->h_dest, me->mac) ||
	    bpf_ntohl(header->network) != config->network ||
	    (header->type != NICPS_TYPE_CONTRIBUTION && header->type != NICPS_TYPE_ASK))
		return NULL;
	return header;
}

int nicps_switch(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	const struct nicps_switch_config *config = nicps_switch_config();
	struct nicps_header *header;
	struct nicps_sender sender;
	u8 to[ETH_ALEN];
	int verdict, reason;

	if (!ethernet || !config || ethernet->h_proto != bpf_htons(NICPS_ETHERTYPE))
		return XDP_PASS;
	header = nicps_to_switch(&cursor, ethernet, config);
	if (!header)
		return XDP_PASS;
	sender = nicps_sender_of(header);
	verdict = nicps_take_in(&cursor, header, &sender, ethernet, config);
	if (verdict >= 0)
		return verdict;
	/* The answer to a question goes to the member that asked; a finished sum goes to all. */
	if (verdict == NICPS_SEND_ALL)
		__builtin_memcpy(to, config->everybody, ETH_ALEN);
	else
		__builtin_memcpy(to, ethernet->h_source, ETH_ALEN);
	reason = nicps_make_own(ethernet, header, header->type, to, NICPS_THE_SWITCH,
				config->keyed, cursor.end, NICPS_CONTRIBUTION_WORDS);
	if (reason != NICPS_BELIEVED)
		return nicps_drop(reason);
	return verdict == NICPS_SEND_ALL ? nicps_send_to_ports() : XDP_TX;
}
