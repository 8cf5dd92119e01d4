// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The program of servers in a benchmark (`nicps bench kernel --servers`). A
 * test run repeats one frame, which is an answer afterwards. So these programs
 * make the next push or pull from it each time, as long as the first, and sign
 * it if there is a key. The measured program is nicps_xdp, which goes on with
 * nicps_servers. Those that end in _none do the same without it, to be
 * subtracted. All members have one MAC address.
 */
#include "nicps_servers.c"

#define NICPS_BENCH_WORKER 2
#define NICPS_BENCH_BYTES \
	(NICPS_ETHERNET_BYTES + NICPS_PUSH_HEADER_BYTES + NICPS_PAYLOAD_BYTES)

/* nicps_xdp, once it is loaded. */
BPF_PROG_ARRAY(nicps_bench_timed, 1);

/* The next fragment, or the first of the next step or pull. False for any other frame. */
static __always_inline bool nicps_next(struct xdp_md *ctx, u8 type, bool answers)
{
	const struct nicps_config *config = nicps_config();
	const struct nicps_key *key = nicps_key();
	struct nicps_cursor cursor;
	struct nicps_header *header;
	struct nicps_push *body;
	long length;
	u32 index, number, fragments;
	__be64 tag;

	/* A short answer has cut the frame; runs without an answer must bear this cost, too. */
	if (!answers)
		bpf_xdp_adjust_tail(ctx, -NICPS_PAYLOAD_BYTES);
	length = (void *)(long)ctx->data_end - (void *)(long)ctx->data;
	if (length != NICPS_BENCH_BYTES &&
	    bpf_xdp_adjust_tail(ctx, (int)(NICPS_BENCH_BYTES - length)))
		return false;
	cursor = nicps_cursor_of(ctx);
	if (!nicps_take_ethernet(&cursor))
		return false;
	header = nicps_take_header(&cursor);
	body = nicps_take_push(&cursor);
	if (!header || !body || !config || !key)
		return false;
	number = bpf_ntohl(body->number);
	fragments = bpf_ntohl(body->fragments);
	index = bpf_ntohl(body->index) + 1;
	if (index >= fragments) {
		index = 0;
		number++;
	}
	body->number = bpf_htonl(number);
	body->index = bpf_htonl(index);
	body->version = 0;
	body->width = type == NICPS_TYPE_PULL ? 32 : config->width;
	body->exponent = -NICPS_PARAMETER_BITS;
	header->type = type;
	header->flags = 0;
	header->sender = bpf_htons(NICPS_BENCH_WORKER);
	header->length = bpf_htons(NICPS_PUSH_HEADER_BYTES + NICPS_PAYLOAD_BYTES);
	/* The answer has a number of its own. */
	header->sequence = bpf_htonl(number * fragments + index + 1);
	if (config->keyed &&
	    nicps_long_tag(key, header, cursor.end, NICPS_CONTRIBUTION_WORDS, &tag))
		header->tag = tag;
	return true;
}

int nicps_bench_push(struct xdp_md *ctx)
{
	if (nicps_next(ctx, NICPS_TYPE_PUSH, true))
		nicps_bench_timed.call(ctx, 0);
	return XDP_ABORTED;
}

int nicps_bench_push_none(struct xdp_md *ctx)
{
	const struct nicps_config *config = nicps_config();

	nicps_next(ctx, NICPS_TYPE_PUSH, config && config->width == 32);
	return XDP_DROP;
}

int nicps_bench_pull(struct xdp_md *ctx)
{
	if (nicps_next(ctx, NICPS_TYPE_PULL, true))
		nicps_bench_timed.call(ctx, 0);
	return XDP_ABORTED;
}

int nicps_bench_pull_none(struct xdp_md *ctx)
{
	nicps_next(ctx, NICPS_TYPE_PULL, true);
	return XDP_DROP;
}
