// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The namespace lab's switch port: loses frames at random, and counts.
 *
 * lab_from_host runs in XDP at the switch's end of a cable, lab_to_host at
 * the clsact egress of the same port, so each direction loses on its own.
 * A frame that the kernel's segmentation offload has put together out of
 * many is one frame here, in the direction to the host.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/pkt_cls.h>

/* Interface numbers count up from 1 in a namespace; 64 ports fit well. */
#define LAB_PORTS 256

struct lab_config {
	/* A frame is lost if 32 random bits are below this; 1 << 32: always. */
	u64 threshold;
};

struct lab_count {
	u64 passed;
	u64 dropped;
};

/* Two elements a port, by interface number: from its host, then to it. */
BPF_F_TABLE("array", u32, struct lab_config, config, 1, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct lab_count, counts, 2 * LAB_PORTS, BPF_F_MMAPABLE);

static __always_inline int lab_lost(u32 ifindex, u32 direction)
{
	u32 key = 0;
	struct lab_config *settings = config.lookup(&key);
	struct lab_count *count;

	key = 2 * ifindex + direction;
	count = counts.lookup(&key);
	if (!settings || !count)
		return 0;
	if (bpf_get_prandom_u32() < settings->threshold) {
		__sync_fetch_and_add(&count->dropped, 1);
		return 1;
	}
	__sync_fetch_and_add(&count->passed, 1);
	return 0;
}

int lab_from_host(struct xdp_md *ctx)
{
	return lab_lost(ctx->ingress_ifindex, 0) ? XDP_DROP : XDP_PASS;
}

int lab_to_host(struct __sk_buff *skb)
{
	return lab_lost(skb->ifindex, 1) ? TC_ACT_SHOT : TC_ACT_OK;
}
