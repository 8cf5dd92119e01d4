# SPDX-License-Identifier: Apache-2.0
"""802.1p tags in the real XDP and egress programs: a hint, which changes nothing of what a frame does."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf, loader, tags
from nicps.wire import FrameType
from tests.stripes_model import ChannelsModel, StripesModel
from tests.vectors import encode
from tests.vectors.encode import put_tag
from tests.xdp.kernel import MACS, NETWORK, VIEW
from tests.xdp.striped import Target
from tests.xdp.test_channels import Host, play
from tests.xdp.test_egress import GO_ON, HOUR_NS, KEY, MARK, Egress, fragment, token

TRAIN = 0x1122334455667788


def taken_off(frame: bytes) -> tuple[bytes, int]:
    """A frame that has a tag, without it, and the priority in it."""
    tpid, tci = struct.unpack(">HH", frame[12:16])
    assert tpid == 0x8100 and not tci & 0x1FFF
    return frame[:12] + frame[16:], tci >> 13


class TaggedTarget(Target):
    """Every frame comes with a tag, of any priority; what is sent back has one with its channel's."""

    def begin(self, model: StripesModel | ChannelsModel) -> None:
        super().begin(model)
        self.config["tags"] = 1
        self.channels["priority"] = (3, 5, 2, 7, 1, 6, 4, 0)
        self._next = 0

    def count(self, frame: bytes) -> tuple[str, tuple[str, ...], bytes]:
        self._next += 1
        verdict, names, after = super().count(put_tag(frame, self._next % 8))
        if verdict != "tx":
            return verdict, names, after
        after, priority = taken_off(after)
        flags = wire.unpack_header(after[wire.ETHERNET_BYTES :]).flags
        assert priority == self.channels["priority"][wire.channel_of(flags)]
        return verdict, names, after


@pytest.fixture(scope="module")
def target() -> Iterator[TaggedTarget]:
    made = TaggedTarget(room=64)
    yield made
    made.close()


@pytest.fixture(scope="module")
def programs() -> Iterator[Egress]:
    loaded = loader.load("nicps.c", {"nicps_xdp": "xdp", "nicps_egress": "sched_cls"})
    yield Egress(loaded)
    loaded.close()


# ---- frames of stripes


def test_frames_with_a_tag_do_what_they_do_without(target: TaggedTarget) -> None:
    """Of 20 random sequences, against the same model; and what is sent back has the priority of its channel."""
    reached = Counter[str]()
    for seed in range(20):
        reached += play(target, seed, 3)
    assert min(reached[f"{name} True"] for name in ("summed", "clocked", "answered")) > 0, reached


def test_answers_have_the_priority_of_their_channel(target: TaggedTarget) -> None:
    host = Host(target)
    for channel in (0, 1, 3):
        assert host.give(FrameType.CONTRIBUTION, 2, channel, 0).counters == ("gathered",)
        assert host.give(FrameType.CONTRIBUTION, 3, channel, 0).counters == ("summed",)
    host.same()


def test_without_tags_nothing_is_put_before_what_is_sent(target: TaggedTarget) -> None:
    host = Host(target)
    target.config["tags"] = 0
    for sender in (2, 3):
        frame = host.frame(FrameType.CONTRIBUTION, sender, 1, 0)
        verdict, _, after = Target.count(target, put_tag(frame, 4))
    assert verdict == "tx" and after[12:14] == frame[12:14] and len(after) == len(frame)


# ---- tokens, and what goes up


def bouncing(programs: Egress, key: bytes | None) -> None:
    """The next token for this host is sent on by the program."""
    programs.reset(key)
    config = programs.maps.config
    config["enabled"] = config["bounce"] = config["round"] = config["round_high"] = 1
    config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS
    config["tags"] = 1


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_token_goes_on_with_the_priority_of_control(
    programs: Egress, key: bytes | None, tagged: bool
) -> None:
    bouncing(programs, key)
    plain = token(3, sender=3)
    frame = wire.ethernet(MACS[2], encode.sign(plain, key) if key else plain)
    run = bpf.prog_test_run(programs.xdp, put_tag(frame, 7) if tagged else frame)
    assert run.verdict == bpf.XDP_TX, programs.maps.counters()
    sent, priority = taken_off(run.frame)
    assert priority == tags.control() == 7
    assert programs.maps.bounced() == sent[wire.ETHERNET_BYTES :], "what the agent repeats has none"
    if key:
        assert sent[14:] == encode.sign(sent[14:], key)
    programs.maps.config["tags"] = 0


def test_what_goes_up_has_no_tag(programs: Egress) -> None:
    programs.reset(None)
    control = wire.pack(wire.Header(network=NETWORK, view=VIEW, sender=3), wire.Fail(), tail=b"why")
    frame = wire.ethernet(MACS[2], control)
    programs.maps.config["tags"] = 1
    seal = programs.maps.config["seal"].tobytes()
    for given in (frame, put_tag(frame, 7), put_tag(frame)):
        run = bpf.prog_test_run(programs.xdp, given)
        assert run.verdict == bpf.XDP_PASS and run.frame == seal + frame[6:]
    programs.maps.config["tags"] = 0


def test_frames_of_other_networks_are_left_alone(programs: Egress) -> None:
    """Of a virtual network's number, behind two tags, of another protocol, or cut off: they pass as they are."""
    programs.reset(None)
    before = programs.maps.counters()
    frame = wire.ethernet(MACS[2], token(3, sender=3))
    other = encode.ethernet(MACS[2].hex(":"), token(3, sender=3), 0x0800)
    given = [put_tag(frame, 3, number) for number in (1, 0xFFF)]
    given += [
        put_tag(put_tag(frame)),
        put_tag(frame, tpid=0x88A8),
        put_tag(other),
        put_tag(frame)[:15],
    ]
    for each in given:
        run = bpf.prog_test_run(programs.xdp, each)
        assert (run.verdict, run.frame) == (bpf.XDP_PASS, each)
    assert programs.maps.counters() == before
    cut = put_tag(frame)[:18]
    run = bpf.prog_test_run(programs.xdp, cut)
    assert run.verdict == bpf.XDP_DROP
    assert programs.maps.counters()["truncated"] == before["truncated"] + 1


def test_a_bit_beside_the_priority_is_no_part_of_a_networks_number(programs: Egress) -> None:
    """Drop eligible: some switches set it."""
    programs.reset(None)
    programs.maps.config["enabled"] = 0
    frame = put_tag(wire.ethernet(MACS[2], token(3, sender=3)), 3, 0x1000)
    before = programs.maps.counters()["disabled"]
    assert bpf.prog_test_run(programs.xdp, frame).verdict == bpf.XDP_DROP
    assert programs.maps.counters()["disabled"] == before + 1


def test_tags_of_a_train_are_counted(programs: Egress) -> None:
    programs.reset(None)
    train = programs.maps.expect(TRAIN)

    def probe(nonce: int, step: wire.ProbeStep = wire.ProbeStep.TRAIN) -> bytes:
        body = wire.Probe(nonce, 1, step)
        tail = bytes(wire.PAYLOAD_BYTES)
        return wire.ethernet(MACS[2], wire.pack(wire.Header(network=NETWORK), body, tail=tail))

    for frame in (
        probe(TRAIN),
        put_tag(probe(TRAIN), 5),
        put_tag(probe(TRAIN)),
        put_tag(probe(TRAIN + 1)),
    ):
        assert bpf.prog_test_run(programs.xdp, frame).verdict == bpf.XDP_DROP
    ask = put_tag(probe(TRAIN, wire.ProbeStep.ASK))
    assert bpf.prog_test_run(programs.xdp, ask).verdict == bpf.XDP_PASS
    assert (int(train["count"]), int(train["tagged"])) == (3, 2)


# ---- the way out


def test_a_frame_with_a_tag_is_signed_as_one_without(programs: Egress) -> None:
    programs.reset(KEY)
    plain = fragment(np.random.default_rng(3).bytes(1440))
    frame = wire.ethernet(MACS[0], plain)
    first = bpf.prog_test_run(programs.egress, frame, mark=MARK)
    run = bpf.prog_test_run(programs.egress, put_tag(frame, 5), mark=MARK)
    assert first.verdict == run.verdict == GO_ON
    sent, priority = taken_off(run.frame)
    assert priority == 5 and programs.maps.sequence == 2
    assert sent[14:] == encode.sign(sent[14:], KEY) != first.frame[14:]
    for other in (put_tag(frame, 5, network=3), put_tag(put_tag(frame))):
        run = bpf.prog_test_run(programs.egress, other, mark=MARK)
        assert run.frame == other and programs.maps.sequence == 2
