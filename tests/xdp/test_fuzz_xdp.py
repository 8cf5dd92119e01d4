# SPDX-License-Identifier: Apache-2.0
"""Mutated frames through the programs by BPF_PROG_TEST_RUN: each is treated as the model says, and nothing else moves.

The model (tests/model.py) decides which frames are valid. It is asked for every frame: verdict, counter, frame out and
sign of life must be the same, and after each batch all that the maps hold, what lies behind the accumulators and slots
in use included. A failing batch names its number: `batch_of(seed, number)` makes it again.

NICPS_FUZZ_FRAMES is how many frames the short run takes, where it is to be more or fewer (a slow guest).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps
from nicps.layout import layout
from tests import replay
from tests.model import DROP, PASS, SERVERS, STRIPES, TX
from tests.vectors import encode
from tests.xdp.mutations import Mutator
from tests.xdp.target import XdpTarget

BATCH = 250
FRAMES = int(os.environ.get("NICPS_FUZZ_FRAMES", "100000"))
BLOCKS = 6  # allocated in a bank; those that a batch does not use are watched
NETWORK, VIEW, GENERATION = 0x0A0B0C0D, 3, 4
TRAIN = 0x1122334455667788
SWITCH = "02:6e:69:63:70:73"
#: Counters that a test run on one processor cannot reach: two processors at once, a second's worth of control frames,
#: and those of the egress program or a Linux switch only; and stripes and servers, whose room is not loaded
#: (tests/xdp/test_stripes.py, tests/xdp/test_servers.py).
NEVER = {"busy", "limited", "spent", "left_out"}
NEVER |= {"gathered", "summed", "stored", "clocked", "answered", "unready", "astray"}
NEVER |= {"pushed", "pulled", "passed_on", "acknowledged", "refused", "full"}
NEVER |= {"direct", "confined"}
#: Fewer than ten in 10,000 frames, or none in all batches but a few: a short run may miss them.
RARE = {"bounced", "disabled", "heard", "range"}
#: Frames that carry the tag of the kernel's key.
SIGNED = {wire.FrameType.TOKEN, wire.FrameType.FRAGMENT} | STRIPES | SERVERS
PLACES = {32: 4, 16: 2, 8: 1, 0: 8}


def mac(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


class Batch:
    """A configuration, and frames that fit it more or less."""

    def __init__(self, seed: int, number: int) -> None:
        rng = self.rng = np.random.default_rng((seed, number))
        members = int(rng.choice([2, 3, 5, 64]))
        self.own = int(rng.integers(1, members + 1))
        holes = {k for k in range(1, members + 1) if rng.random() < 0.1 and k != self.own}
        self.others = [k for k in range(1, members + 1) if k != self.own and k not in holes]
        macs = [mac(0 if k in holes else k) for k in range(1, members + 1)]
        self.macs = [
            bytes.fromhex(m.replace(":", "")) if k not in holes else bytes(6)
            for k, m in enumerate(macs, 1)
        ]
        self.key = rng.bytes(16) if rng.random() < 0.6 else b""
        self.round = int(rng.choice([1, 7, 2**32 - 2]))
        self.sequence = 1000
        self.config: dict[str, Any] = {
            "enabled": int(rng.random() < 0.95),
            "network": NETWORK,
            "view": VIEW,
            "round_low": self.round,
            "round_high": self.round + int(rng.integers(2)),
            "number": self.own,
            "members": members,
            "live": len(self.others) + 1,
            "next": (self.others or [self.own])[0],
            "bounce": int(rng.random() < 0.7),
            "round": self.round,
            "sent_seen": int(rng.integers(3)),
            "own_sent": int(rng.integers(3)),
            "blocks": int(rng.integers(1, BLOCKS)),
            "keyed": int(bool(self.key)),
            "sums": int(rng.random() < 0.25),
            "sums_next": int(rng.random() < 0.25),
            "alive": bool(rng.random() < 0.9),
        }
        good = [self._good(rng) for _ in range(40)]
        self.frames = Mutator(rng)(good, BATCH)
        if self.key:
            self.frames = [self._signed(frame) for frame in self.frames]

    def _signed(self, frame: bytes) -> bytes:
        """Half of the changed frames are signed all the same, as by a member that errs."""
        if len(frame) < 46 or self.rng.random() < 0.5:
            return frame
        return frame[:14] + encode.sign(frame[14:], self.key)

    def _good(self, rng: np.random.Generator) -> bytes:
        """A frame of a member, as the program must take it."""
        self.sequence += int(rng.integers(1, 40))
        sender = int(rng.choice(self.others)) if self.others else self.own
        round_ = int(rng.integers(self.config["round_low"], self.config["round_high"] + 1))
        header = {"network": NETWORK, "view": VIEW, "round": round_, "sender": sender}
        header["sequence"] = self.sequence
        kind = str(rng.choice(["fragment", "token", "control"], p=[0.5, 0.35, 0.15]))
        make = {"fragment": self._fragment, "token": self._token, "control": self._control}[kind]
        source = mac(sender)
        if kind == "fragment" and self.config["sums" if round_ == self.round else "sums_next"]:
            header |= {"sender": 0, "flags": encode.ADD}
            source = SWITCH
        data = make(rng, header)
        if self.key:
            data = encode.sign(data, self.key)
        return encode.ethernet(source, data)

    def _fragment(self, rng: np.random.Generator, header: dict[str, Any]) -> bytes:
        sums = not header["sender"]
        width = int(rng.choice([32, 16, 8] if sums else [32, 16, 8, 0]))
        places = PLACES[width] * self.config["blocks"]
        index = int(rng.integers(min(places, 6)))
        fields = {"index": index, "fragments": int(rng.integers(index + 1, places + 1))}
        fields |= {"lanes": 1440 * 8 // (width or 8), "width": width, "samples": 32}
        fields["shift"] = 0 if sums else int(rng.integers(wire.MAX_SHIFT[width] + 1))
        return encode.frame(header, ("fragment", fields), tail=rng.bytes(1440))

    def _token(self, rng: np.random.Generator, header: dict[str, Any]) -> bytes:
        members = self.config["members"]
        most = min(4, (1500 - 72 - 20 * members) // 8)
        ranges = int(rng.integers(most + 1)) if rng.random() < 0.2 else 0
        fields = {
            "generation": GENERATION,
            "hop": int(rng.integers(1, 400)),
            "owner": self.own if rng.random() < 0.6 else int(rng.choice([self.own, *self.others])),
            "state": int(rng.random() < 0.1),
            "members": members,
            "idle": int(rng.integers(3)),
            "ranges": ranges,
            "sent": int(rng.integers(4)),
        }
        header = header | {"flags": int(rng.choice([0, 0, 0, 1, 2, 4]))}
        return encode.frame(header, ("token", fields), tail=rng.bytes(20 * members + 8 * ranges))

    def _control(self, rng: np.random.Generator, header: dict[str, Any]) -> bytes:
        name = str(rng.choice([t for t in encode.TYPES if t not in ("", "token", "fragment")]))
        fields: dict[str, Any] = {}
        if name == "probe":
            fields = {"nonce": TRAIN, "number": 1, "step": int(rng.integers(1, 3))}
        return encode.frame(header, (name, fields), tail=rng.bytes(int(rng.integers(60))))


def batch_of(seed: int, number: int) -> Batch:
    """The same batch again."""
    return Batch(seed, number)


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(BLOCKS)
    yield target
    target.close()


def run_batch(program: XdpTarget, batch: Batch, where: str) -> Counter[str]:
    """The batch through program and model; how often each counter rose, and "" for frames that are not ours."""
    program.begin(batch.config, batch.macs, batch.key)
    program.expect(TRAIN)
    model = replay.ModelTarget(batch.config, batch.macs, batch.key)
    model.model.train = TRAIN
    agents = program.agents()
    reasons: Counter[str] = Counter()
    for at, frame in enumerate(batch.frames):
        found, expected = program.run(frame), model.run(frame)
        if found != expected:
            pytest.fail(f"{where}, frame {at}: {found} is not {expected}: {frame.hex()}")
        assert found.verdict in (PASS, DROP, TX)
        ours = frame[12:14] == wire.ETHERTYPE.to_bytes(2, "big")
        assert len(found.counters) == ours, f"{where}, frame {at}: {found}"
        reasons[found.counters[0] if ours else ""] += 1
    replay.compare(program.state(), model.state())
    assert program.agents() == agents, where
    assert program.counted() == model.model.counted, where
    return reasons


def fuzz(program: XdpTarget, seed: int, frames: int) -> None:
    reasons: Counter[str] = Counter()
    for number in range(frames // BATCH):
        reasons += run_batch(program, Batch(seed, number), f"seed {seed}, batch {number}")
    assert reasons.total() == frames // BATCH * BATCH > 0
    least = max(1, frames // 100_000 * 10)
    excused = NEVER | (RARE if frames < 100_000 else set())
    rare = {name for name in ("", *layout().counters) if reasons[name] < least} - excused
    assert not rare, f"hardly reached: {rare} of {dict(reasons)}"
    assert not NEVER & set(reasons), reasons


def test_mutated_frames(program: XdpTarget) -> None:
    fuzz(program, 1, FRAMES)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million(program: XdpTarget) -> None:
    fuzz(program, 2, 1_000_000)


def test_what_is_sent() -> None:
    """The program that signs touches the number and the tag of our tokens, fragments and stripes, and nothing else."""
    loaded = loader.load("nicps.c", {"nicps_xdp": "xdp", "nicps_egress": "sched_cls"})
    try:
        maps, signs = Maps(loaded.maps), loaded.programs["nicps_egress"]
        signed = 0
        for number in range(40):
            batch = Batch(3, number)
            maps.set_key(bytes(range(16)))
            for frame in batch.frames:
                run = bpf.prog_test_run(signs, frame, mark=layout().limits["MARK"])
                assert run.verdict == 2**32 - 1, "it goes on"
                cut = len(frame) < 46 or frame[12:14] != wire.ETHERTYPE.to_bytes(2, "big")
                if cut or frame[15] not in SIGNED:
                    assert run.frame == frame
                    continue
                signed += 1
                assert run.frame[34:38] == maps.sequence.to_bytes(4, "big")
                assert run.frame[:34] + run.frame[46:] == frame[:34] + frame[46:]
                length = int.from_bytes(frame[32:34], "big")
                if 32 <= length <= min(len(frame) - 14, wire.MAX_FRAME_BYTES) and length % 4 == 0:
                    assert run.frame[14:] == encode.sign(run.frame[14:], bytes(range(16)))
        assert signed > 1000
    finally:
        loaded.close()
