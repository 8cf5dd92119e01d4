// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The program of stripes in a benchmark (`nicps bench kernel --stripes`). A test
 * run repeats one frame, which is another one after an answer. So these programs
 * write the next fragment's fields into it each time, and sign it if there is a
 * key. The measured program is nicps_xdp, which goes on with nicps_stripes.
 * nicps_bench_stripe_none does the same without it, to be subtracted. All
 * members have one MAC address, which is also that of all hosts.
 */
#include "nicps.c"

/* The next frame: `first` to `last` send one after another, then the next round begins. */
struct nicps_bench_next {
	u32 type;
	u32 first;
	u32 last;
	u32 sender;
	u32 round;
	u32 index;
	u32 fragments;
	u32 sequence;
	u32 unit;
};

BPF_F_TABLE("array", u32, struct nicps_bench_next, nicps_bench_next, 1, BPF_F_MMAPABLE);

/* nicps_xdp, once it is loaded. */
BPF_PROG_ARRAY(nicps_bench_timed, 1);

static __always_inline bool nicps_step(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = nicps_cursor_of(ctx);
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	struct nicps_header *header = nicps_take_header(&cursor);
	struct nicps_contribution *body = nicps_take_contribution(&cursor);
	const struct nicps_config *config = nicps_config();
	const struct nicps_key *key = nicps_key();
	struct nicps_bench_next *next;
	u32 zero = 0;
	__be64 tag;

	next = nicps_bench_next.lookup(&zero);
	if (!ethernet || !header || !body || !config || !key || !next)
		return false;
	header->type = next->type;
	header->flags = 0;
	header->sender = bpf_htons(next->sender);
	header->round = bpf_htonl(next->round);
	header->sequence = bpf_htonl(++next->sequence);
	body->index = bpf_htonl(next->index);
	body->exponent = next->unit;
	if (++next->index >= next->fragments) {
		next->index = 0;
		if (++next->sender > next->last) {
			next->sender = next->first;
			next->round++;
		}
	}
	if (config->keyed &&
	    nicps_long_tag(key, header, cursor.end, NICPS_CONTRIBUTION_WORDS, &tag))
		header->tag = tag;
	return true;
}

int nicps_bench_stripe(struct xdp_md *ctx)
{
	if (nicps_step(ctx))
		nicps_bench_timed.call(ctx, 0);
	return XDP_ABORTED;
}

int nicps_bench_stripe_none(struct xdp_md *ctx)
{
	nicps_step(ctx);
	return XDP_DROP;
}
