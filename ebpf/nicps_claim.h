/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * Claims and rates. Two processors can receive at once, so one of them must own
 * the memory that it adds to or reads. Read by XDP programs.
 */
#ifndef NICPS_CLAIM_H
#define NICPS_CLAIM_H

#include "nicps_shared.h"

#define NICPS_CLAIM_TRIES 64

static __always_inline bool nicps_claim(u64 *claim)
{
	return __sync_val_compare_and_swap(claim, 0, 1) == 0;
}

/* An exchange, not a store: it is a full barrier on every architecture. */
static __always_inline void nicps_release(u64 *claim)
{
	__sync_lock_test_and_set(claim, 0);
}

/*
 * Trainers read sums without a claim once the seen-bits show that they are
 * final. So the seen-bits must not be visible before the lanes are.
 */
static __always_inline void nicps_publish(u64 *word, u64 value)
{
	__sync_lock_test_and_set(word, value);
}

/* Another processor holds a claim for one to three microseconds, so waiting is worth it. */
static __always_inline bool nicps_claim_soon(u64 *claim)
{
#pragma clang loop unroll(disable)
	for (u32 tries = 0; tries < NICPS_CLAIM_TRIES; tries++) {
		if (!*(volatile u64 *)claim && nicps_claim(claim))
			return true;
		bpf_ktime_get_ns(); /* takes a while */
	}
	return false;
}

/*
 * One in each interval, with bursts of up to a second's worth. Two
 * processors at once can let a frame more through: that does no harm.
 */
static __always_inline bool nicps_admit(u64 *due_ns, u64 interval_ns)
{
	u64 now = bpf_ktime_get_coarse_ns();
	u64 due = *due_ns;

	if (due < now)
		due = now;
	if (due - now >= NICPS_SECOND_NS)
		return false;
	*due_ns = due + interval_ns;
	return true;
}

#endif /* NICPS_CLAIM_H */
