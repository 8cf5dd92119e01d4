/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * The checks of a frame's sender, and the limits for frames to the agent. Read
 * by the XDP programs of a host.
 */
#ifndef NICPS_MEMBERS_H
#define NICPS_MEMBERS_H

#include "nicps_claim.h"
#include "nicps_maps.h"
#include "nicps_parse.h"

/* The member of that number if it is in the view, else NULL: numbers have holes (R19). */
static __always_inline struct nicps_member *
nicps_live(const struct nicps_config *config, u32 number)
{
	struct nicps_member *member = nicps_member(number);

	if (!member || number == 0 || number > config->members ||
	    nicps_no_mac(member->mac))
		return NULL;
	return member;
}

/*
 * A host that was evicted must learn of it and be able to come back, so control
 * frames of all senders go up. But a flood, of a stranger or of a member, must
 * not keep those of another member from the agent, nor overload it.
 */
static __always_inline int nicps_go_up(const struct nicps_config *config, u32 place)
{
	struct nicps_limit *limit = nicps_limit(place);
	u64 interval = NICPS_SECOND_NS / NICPS_OTHERS_RATE;

	if (place != NICPS_OTHERS) /* a switch has a share, too */
		interval = NICPS_SECOND_NS / NICPS_MEMBERS_RATE * (config->live + 1);
	if (limit && !nicps_admit(&limit->due_ns, interval))
		return nicps_drop(NICPS_COUNT_LIMITED);
	nicps_count(NICPS_COUNT_CONTROL);
	return XDP_PASS;
}

static __always_inline int nicps_control(const struct ethhdr *ethernet,
					 const struct nicps_header *header,
					 const struct nicps_config *config)
{
	u32 number = bpf_ntohs(header->sender);
	struct nicps_member *member = number ? nicps_live(config, number)
					     : nicps_member(0);
	bool known = member && nicps_same_mac(member->mac, ethernet->h_source);

	return nicps_go_up(config, known ? number : NICPS_OTHERS);
}

/* The header of a complete frame of this network; else NULL, and the reason. */
static __always_inline struct nicps_header *
nicps_open(struct nicps_cursor *cursor, const struct nicps_config *config, u32 *reason)
{
	struct nicps_header *header = nicps_take_header(cursor);
	u32 length;

	*reason = NICPS_COUNT_TRUNCATED;
	if (!header)
		return NULL;
	length = nicps_bounded(header->length);
	if (header->version != NICPS_VERSION)
		*reason = NICPS_COUNT_VERSION;
	else if (length < sizeof(*header) || (void *)header + length > cursor->end)
		*reason = NICPS_COUNT_TRUNCATED;
	else if (bpf_ntohl(header->network) != config->network)
		*reason = NICPS_COUNT_NETWORK;
	else
		return header;
	return NULL;
}

/*
 * The same of a frame that only members of the view in force may send, and that
 * is not this host's own.
 */
static __always_inline struct nicps_header *
nicps_open_in_view(struct nicps_cursor *cursor, const struct nicps_config *config,
		   struct nicps_sender *sender, u32 *reason)
{
	struct nicps_header *header = nicps_open(cursor, config, reason);

	if (!header)
		return NULL;
	*sender = nicps_sender_of(header);
	if (!config->enabled)
		*reason = NICPS_COUNT_DISABLED;
	else if (sender->view != config->view)
		*reason = NICPS_COUNT_VIEW;
	else if (sender->number == config->number)
		*reason = NICPS_COUNT_ECHO;
	else
		return header;
	return NULL;
}

#endif /* NICPS_MEMBERS_H */
