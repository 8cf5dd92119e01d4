/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0) */
/*
 * For an XDP program in which a processor stalls at the place that a test names,
 * until the test lets it go on (tests/xdp/stall.py).
 */
#ifndef STALL_H
#define STALL_H

#include <uapi/linux/bpf.h>

#define STALL_CHECKED 1 /* a fragment's round is checked, its slot is not claimed */
#define STALL_CLAIMED 2 /* the slot is claimed */
#define STALL_ADDED 3 /* the fragment is added, and not counted */
#define STALL_BOUNCED 4 /* a token is bounced, its copy is not written */
#define STALL_COPIED 5 /* a remainder is copied, and the place has no new tag */
#define STALL_FIXED 6 /* a push's staleness is fixed, and nothing of it is added */
#define STALL_WHOLE 7 /* a push is whole and counted, and has not raised the version */

#define STALL_PIECE (1 << 24)
#define STALL_PIECES 40

struct stall {
	u64 place; /* where the next processor stalls; 0: nowhere */
	u64 reached; /* by a processor, that waits now */
	u64 go;
	u64 late; /* it has waited for too long, and has gone on */
};

/* To fill it takes a processor nearly a millisecond. */
struct stall_piece {
	u8 bytes[STALL_PIECE];
};

BPF_F_TABLE("array", u32, struct stall, stalls, 1, BPF_F_MMAPABLE);
BPF_TABLE("array", u32, struct stall_piece, stall_pieces, 1);

static __always_inline void stall_at(u64 place)
{
	volatile struct stall *stall;
	u32 key = 0;
	void *piece;

	stall = stalls.lookup(&key);
	piece = stall_pieces.lookup(&key);
	if (!stall || !piece || stall->place != place)
		return;
	stall->place = 0;
	stall->reached = 1;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < STALL_PIECES; i++) {
		if (stall->go)
			return;
		/* Of no address: it fills the piece with zeros. */
		bpf_probe_read_kernel(piece, STALL_PIECE, NULL);
	}
	stall->late = 1;
}

#define NICPS_STALL(place) stall_at(STALL_##place)

#endif /* STALL_H */
