// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The program of a job with parameter servers, at servers and at workers. It
 * has a source of its own, which is compiled and loaded only for such a job
 * (nicps/dataplane/loader.py:load_beside). It shares the maps of nicps.c, and
 * nicps_xdp goes on with it in the place of nicps_stripes.
 */
#include <uapi/linux/bpf.h>
#include "nicps_members.h"
#include "nicps_served_maps.h"
#include "nicps_serve_own.h"
#include "nicps_vlan.h"

/* Reached by a tail call from nicps_xdp: the frame is of stripes or servers. */
static __always_inline int nicps_served(struct xdp_md *ctx, struct nicps_cursor *cursor,
					struct ethhdr *ethernet,
					const struct nicps_config *config)
{
	u32 reason;
	struct nicps_sender sender;
	struct nicps_header *header =
		nicps_open_in_view(cursor, config, &sender, &reason);
	struct nicps_member *member;
	int answer;

	if (!header)
		return nicps_drop(reason);
	member = nicps_live(config, sender.number);
	if (!member || !nicps_same_mac(member->mac, ethernet->h_source))
		return nicps_drop(NICPS_COUNT_STRANGER);
	answer = nicps_serve_frame(cursor, ethernet, header, &sender, member, config);
	if (answer == NICPS_ANSWER_HELD)
		return nicps_answer(ethernet, header, NICPS_TYPE_HELD, member->mac,
				    cursor->end, config);
	if (answer == NICPS_ANSWER_TAKEN)
		return nicps_answer_short(ctx, NICPS_TYPE_TAKEN,
					  NICPS_PUSH_HEADER_BYTES, member->mac,
					  config->number, config->keyed);
	return answer;
}

/* No frame of servers goes up. */
int nicps_servers(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	const struct nicps_config *config = nicps_config();
	int verdict;

	if (!ethernet || !config)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	verdict = nicps_served(ctx, &cursor, ethernet, config);
	return nicps_tag_out(ctx, verdict, nicps_priority(ctx), config);
}

/* On no interface: the agent of a host that serves and trains runs it. */
int nicps_serve_own(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	const struct nicps_config *config = nicps_config();

	if (!nicps_take_ethernet(&cursor) || !config)
		return nicps_drop(NICPS_COUNT_TRUNCATED);
	return nicps_serve_own_frame(&cursor, config);
}
