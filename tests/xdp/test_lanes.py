# SPDX-License-Identifier: Apache-2.0
"""The kernel's sums, bit for bit, against NumPy: every width, every shift, 64 members, two processors at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf
from tests.xdp.kernel import (
    LANES,
    VIEW,
    Kernel,
    fragment,
    kernel,
    lanes,
    payload_of,
    stepping_kernel,
)

WIDTHS = (32, 16, 8)
INDEX = slice(wire.ETHERNET_BYTES + wire.HEADER_BYTES, wire.ETHERNET_BYTES + wire.HEADER_BYTES + 4)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Kernel]:
    with kernel() as program:
        yield program


@pytest.mark.parametrize("width", WIDTHS)
def test_every_shift_stored_and_added(loaded: Kernel, width: int) -> None:
    for shift in range(wire.MAX_SHIFT[width] + 1):
        loaded.reset()
        first, second = lanes(width, shift), lanes(width, shift + 1000)
        for sender, values in ((2, first), (3, second)):
            frame = fragment(payload_of(values, width), width=width, shift=shift, sender=sender)
            assert loaded.run(frame).verdict == bpf.XDP_DROP
        sums = loaded.maps.accumulators[1].reshape(-1)
        assert (sums[: LANES[width]] == (first << shift) + (second << shift)).all(), shift
        assert not sums[LANES[width] :].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_shift_over_the_limit(loaded: Kernel, width: int) -> None:
    loaded.reset()
    for shift in range(wire.MAX_SHIFT[width] + 1, 256):
        frame = fragment(bytes(1440), width=width, shift=shift)
        assert loaded.run(frame).verdict == bpf.XDP_DROP
    assert loaded.maps.count(1, 7, 0) == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_64_members_of_the_largest_lanes_do_not_overflow(loaded: Kernel, width: int) -> None:
    loaded.reset()
    values = np.full(LANES[width], -(2 ** (width - 1)), np.int64)
    payload = payload_of(values, width)
    for sender in range(2, 65):
        loaded.run(fragment(payload, width=width, shift=wire.MAX_SHIFT[width], sender=sender))
    assert loaded.maps.count(1, 7, 0) == 63
    exact = 63 * -(2 ** (width - 1)) << wire.MAX_SHIFT[width]
    assert exact >= -(2**63)
    assert (loaded.maps.accumulators[1].reshape(-1)[: LANES[width]] == exact).all()


def test_fragments_lie_side_by_side_in_a_block(loaded: Kernel) -> None:
    for width in WIDTHS:
        loaded.reset(blocks=3)
        total = 3 * 1440 // LANES[width]
        values = [lanes(width, index) for index in range(total)]
        for index in reversed(range(total)):
            frame = fragment(
                payload_of(values[index], width), width=width, index=index, fragments=total
            )
            # The last to come completes its sender, and goes up to wake the agent.
            assert loaded.run(frame).verdict == (bpf.XDP_PASS if index == 0 else bpf.XDP_DROP)
        assert (loaded.maps.accumulators[1].reshape(-1) == np.concatenate(values)).all()


def test_raw_bytes_lie_side_by_side(loaded: Kernel) -> None:
    loaded.reset(blocks=2)
    data = np.random.default_rng(1).bytes(16 * 1440)
    for index in range(16):
        piece = data[index * 1440 :][:1440]
        loaded.run(fragment(piece, width=0, index=index, fragments=16, round_=2))
    assert loaded.maps.accumulators[0].tobytes() == data


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_two_processors_into_the_same_slots() -> None:
    """Two senders go through the same slots side by side, until each has met the other in some.

    The benchmark's program makes the next fragment out of the last, so that the test run itself, and not Python, sets
    the pace; it is otherwise the same program.
    """
    fragments = 16_000
    values = [lanes(32, seed) for seed in (1, 2)]
    senders, processors = (2, 3), sorted(os.sched_getaffinity(0))
    with stepping_kernel() as racing:
        racing.reset(blocks=fragments // 4)
        busy = 0
        for round_ in range(1, 2000):
            racing.maps.config["round_high"] = round_
            frames = [
                bytearray(
                    fragment(
                        payload_of(value, 32),
                        width=32,
                        sender=sender,
                        fragments=fragments,
                        round_=round_,
                    )
                )
                for sender, value in zip(senders, values, strict=True)
            ]
            for frame in frames:
                frame[INDEX] = b"\xff\xff\xff\xff"  # the program steps on before it works
            begin = threading.Barrier(len(frames))
            before = racing.maps.counters()

            def send(frame: bytearray, processor: int, begin: threading.Barrier = begin) -> None:
                os.sched_setaffinity(0, {processor})  # of this thread
                with contextlib.suppress(PermissionError):  # others would keep the two apart
                    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
                begin.wait()
                bpf.prog_test_run(racing.program, bytes(frame), fragments)

            threads = [
                threading.Thread(target=send, args=both)
                for both in zip(frames, processors, strict=False)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            refused = racing.maps.counters()["busy"] - before["busy"]
            busy += refused
            lost = 0
            for sender, frame in zip(senders, frames, strict=True):
                for first, count in racing.maps.missing(round_, VIEW, sender, fragments, fragments):
                    lost += count
                    frame[INDEX] = ((first - 1) & 0xFFFFFFFF).to_bytes(4, "big")
                    bpf.prog_test_run(racing.program, bytes(frame), count)
            assert lost == refused, "who is refused is not counted as seen"
            assert racing.maps.count(round_, VIEW, 0) == 2 * fragments
            sums = racing.maps.accumulators[round_ & 1].reshape(-1, 360)
            assert (sums == values[0] + values[1]).all()
            if busy > 100:
                return
    pytest.fail(f"the two met in {busy} slots only")
