// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The XDP program in a benchmark (`nicps bench kernel`). A test run repeats one
 * frame, so these programs make the next fragment from it each time, and sign
 * it if there is a key. The measured program is nicps_xdp itself, with which
 * the first goes on. nicps_bench_none does the same without it, to be
 * subtracted.
 */
#include "nicps.c"

/* nicps_xdp, once it is loaded: in one program both are too long for the verifier. */
BPF_PROG_ARRAY(nicps_bench_timed, 1);

/*
 * The order of a round: all fragments of member 2, of member 3, ... then the
 * next round. False if the frame is no fragment.
 */
static __always_inline bool nicps_next(struct xdp_md *ctx)
{
	struct nicps_cursor cursor = {
		.at = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
	};
	struct ethhdr *ethernet = nicps_take_ethernet(&cursor);
	struct nicps_header *header = nicps_take_header(&cursor);
	struct nicps_fragment *fragment = nicps_take_fragment(&cursor);
	const struct nicps_config *config = nicps_config();
	const struct nicps_key *key = nicps_key();
	u32 index, sender;
	__be64 tag;

	if (!ethernet || !header || !fragment || !config || !key)
		return false;
	index = bpf_ntohl(fragment->index) + 1;
	if (index >= bpf_ntohl(fragment->fragments)) {
		index = 0;
		sender = bpf_ntohs(header->sender) + 1;
		if (sender > NICPS_MAX_MEMBERS) {
			sender = 2;
			header->round = bpf_htonl(bpf_ntohl(header->round) + 1);
		}
		header->sender = bpf_htons(sender);
	}
	fragment->index = bpf_htonl(index);
	header->sequence = bpf_htonl(bpf_ntohl(header->sequence) + 1);
	if (config->keyed &&
	    nicps_long_tag(key, header, cursor.end, NICPS_FRAGMENT_WORDS, &tag))
		header->tag = tag;
	return true;
}

int nicps_bench_add(struct xdp_md *ctx)
{
	if (nicps_next(ctx))
		nicps_bench_timed.call(ctx, 0);
	return XDP_ABORTED;
}

int nicps_bench_none(struct xdp_md *ctx)
{
	nicps_next(ctx);
	return XDP_DROP;
}
