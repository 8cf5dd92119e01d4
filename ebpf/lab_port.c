// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/*
 * The namespace lab's switch port: does to frames what bad networks do.
 *
 * lab_from_host runs at the clsact ingress of a port, before the bridge, and
 * lab_to_host at its egress, so each direction draws its own random numbers.
 * Many frames that the kernel's segmentation offload has put together are one
 * frame here. A frame that a host's XDP program sends back passes like any
 * other.
 *
 * The kernel can lose, copy and change a frame on the spot, but has no place in
 * which a frame can wait. Frames that shall come late go to the delay line, a
 * process at the far end of the veth "line" (nicps/lab/delayline.py), and come
 * back through lab_release at the veth's near end.
 *
 * A frame's mark says how far it has come. The kernel clears marks between
 * namespaces, so no host can forge one.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/pkt_cls.h>
#include "include/nicps_wire.h"

/* Interface numbers count up from 1 in a namespace; 64 ports fit well. */
#define LAB_PORTS 256
#define LAB_HOSTS 64
/* Hosts' MAC addresses without the last byte, which is their number. */
#define LAB_MACS 0x02000a4d00

#define LAB_FROM_HOST 0
#define LAB_TO_HOST 1

/* A copy: it is neither lost nor copied again. */
#define LAB_COPY 0x4c000001
/* The frame was in the delay line. */
#define LAB_RELEASED 0x4c000002
/* To the delay line and back; the low byte has LAB_LATE and the direction. */
#define LAB_WAITING(ifindex) (0x4d000000 | ((ifindex) << 8))
#define LAB_LATE 2

struct lab_faults {
	/* The fault happens if 32 random bits are below this; 1 << 32: always. */
	u64 loss;
	u64 duplicate;
	u64 corrupt;
	u64 reorder;
	u64 delay_ns;
	/* Ports with different sides of a cut do not receive each other's frames. */
	u32 side;
	/* The near end of the veth to the delay line. */
	u32 line;
	/* Frames of this type from the host that are still to be lost. */
	s32 lose_left;
	u32 lose_type;
};

/* passed + dropped + severed = arrived + duplicated, except for frames that wait. */
struct lab_count {
	u64 passed;
	u64 dropped;
	u64 severed;
	u64 duplicated;
	u64 corrupted;
	u64 reordered;
	u64 delayed;
};

/* Two elements a port, by interface number: from its host, then to it. */
BPF_F_TABLE("array", u32, struct lab_faults, faults, 2 * LAB_PORTS, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct lab_count, counts, 2 * LAB_PORTS, BPF_F_MMAPABLE);
/*
 * Ports' interface numbers by host, if each cable has a middle and a switch
 * that adds behind it; else zeros.
 */
BPF_F_TABLE("array", u32, u32, ports, LAB_HOSTS + 1, BPF_F_MMAPABLE);

static __always_inline int lab_happens(u64 threshold)
{
	return bpf_get_prandom_u32() < threshold;
}

static __always_inline void lab_add(u64 *count)
{
	__sync_fetch_and_add(count, 1);
}

/* Whether that port is on another side of a cut; of 0, the switch is. */
static __always_inline int lab_apart(u32 ifindex, u32 side)
{
	u32 key = 2 * ifindex + LAB_TO_HOST;
	struct lab_faults *there = faults.lookup(&key);

	return there && there->side != side;
}

static __always_inline u64 lab_mac(struct __sk_buff *skb, u32 offset)
{
	u8 mac[ETH_ALEN];

	if (bpf_skb_load_bytes(skb, offset, mac, sizeof(mac)))
		return 0;
	return (u64)mac[0] << 40 | (u64)mac[1] << 32 | (u64)mac[2] << 24 |
	       (u64)mac[3] << 16 | (u64)mac[4] << 8 | mac[5];
}

/*
 * Whether sender and receiver are on different sides of a cut. Of a frame that
 * comes in at the other end of a cable's middle only the sender is known; that
 * is the switch, unless it is a host.
 */
static __always_inline int lab_severed(struct __sk_buff *skb, u32 direction, u32 side)
{
	u32 none = 0, number, *middle = ports.lookup(&none), *port;
	u64 sender;

	if (!middle || !*middle)
		return direction == LAB_TO_HOST &&
		       lab_apart(skb->ingress_ifindex, side);
	if (direction == LAB_FROM_HOST)
		return lab_mac(skb, 0) == NICPS_SWITCH && lab_apart(0, side);
	sender = lab_mac(skb, ETH_ALEN);
	number = sender >> 8 == LAB_MACS ? sender & 0xff : 0;
	if (!number)
		return lab_apart(0, side);
	port = ports.lookup(&number);
	return port && lab_apart(*port, side);
}

/* Whether the frame is of the type that shall be lost, and some are left to lose. */
static __always_inline int lab_chosen(struct __sk_buff *skb, struct lab_faults *fault)
{
	__be16 ethertype;
	u8 type;

	if (fault->lose_left <= 0 ||
	    bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_proto), &ethertype,
			       sizeof(ethertype)) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct nicps_header, type),
			       &type, sizeof(type)))
		return 0;
	if (ethertype != bpf_htons(NICPS_ETHERTYPE) || type != fault->lose_type)
		return 0;
	__sync_fetch_and_add(&fault->lose_left, -1);
	return 1;
}

/* Changes one byte behind the Ethernet header. */
static __always_inline int lab_corrupt(struct __sk_buff *skb)
{
	u32 offset;
	u8 byte;

	if (skb->len <= ETH_HLEN)
		return 0;
	offset = ETH_HLEN + bpf_get_prandom_u32() % (skb->len - ETH_HLEN);
	if (bpf_skb_load_bytes(skb, offset, &byte, 1))
		return 0;
	byte ^= 1 + bpf_get_prandom_u32() % 255;
	return !bpf_skb_store_bytes(skb, offset, &byte, 1, BPF_F_INVALIDATE_HASH);
}

static __always_inline int lab_port(struct __sk_buff *skb, u32 direction)
{
	u32 key = 2 * skb->ifindex + direction;
	u32 mark = skb->mark;
	struct lab_faults *fault = faults.lookup(&key);
	struct lab_count *count = counts.lookup(&key);
	u32 late;

	if (!fault || !count)
		return TC_ACT_OK;
	skb->mark = 0;
	if (mark == LAB_RELEASED) {
		lab_add(&count->passed);
		return TC_ACT_OK;
	}
	if (mark != LAB_COPY) {
		if (lab_severed(skb, direction, fault->side)) {
			lab_add(&count->severed);
			return TC_ACT_SHOT;
		}
		if ((direction == LAB_FROM_HOST && lab_chosen(skb, fault)) ||
		    lab_happens(fault->loss)) {
			lab_add(&count->dropped);
			return TC_ACT_SHOT;
		}
		if (lab_happens(fault->duplicate)) {
			skb->mark = LAB_COPY;
			if (!bpf_clone_redirect(
				    skb, skb->ifindex,
				    direction == LAB_FROM_HOST ? BPF_F_INGRESS : 0))
				lab_add(&count->duplicated);
			skb->mark = 0;
		}
	}
	if (lab_happens(fault->corrupt) && lab_corrupt(skb))
		lab_add(&count->corrupted);
	late = lab_happens(fault->reorder) ? LAB_LATE : 0;
	if (late)
		lab_add(&count->reordered);
	if (fault->delay_ns)
		lab_add(&count->delayed);
	if (late || fault->delay_ns) {
		skb->mark = LAB_WAITING(skb->ifindex) | late | direction;
		return bpf_redirect(fault->line, 0);
	}
	lab_add(&count->passed);
	return TC_ACT_OK;
}

int lab_from_host(struct __sk_buff *skb)
{
	return lab_port(skb, LAB_FROM_HOST);
}

int lab_to_host(struct __sk_buff *skb)
{
	return lab_port(skb, LAB_TO_HOST);
}

int lab_release(struct __sk_buff *skb)
{
	u32 mark = skb->mark;

	if (mark >> 24 != LAB_WAITING(0) >> 24)
		return TC_ACT_SHOT;
	skb->mark = LAB_RELEASED;
	return bpf_redirect(mark >> 8 & 0xff, mark & LAB_TO_HOST ? 0 : BPF_F_INGRESS);
}
