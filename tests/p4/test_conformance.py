# SPDX-License-Identifier: Apache-2.0
"""BMv2 does with every frame what the model says: on the sequences of tests/vectors/, and on random ones.

And what it adds is what hosts add, by the XDP program (`tests.sums`).
"""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nicps.bench.bmv2 import Bmv2
from nicps.lab.namespaces import switch_name
from nicps.switch import Switch
from nicps.switch.runtime import Member
from tests import replay, sums, switch_frames, switched
from tests.p4.bmv2 import Wires, bench
from tests.p4.model import FRAGMENT, SLOTS, ModelSwitch
from tests.switched import CONTROLLER, NETWORK, PORTS, Bench, Recorded
from tests.vectors import encode
from tests.xdp.target import XdpTarget

BLOCKS = 8
WAIT_S = 30.0
thousand = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Rig:
    """A switch, and the model of it: both get the same frames."""

    def __init__(self, bmv2: Bmv2, wires: Wires) -> None:
        self.bmv2, self.wires = bmv2, wires
        self._tagged = False
        self._marks = self._tags = 0

    def begin(
        self, switch: Switch, members: Recorded, each: bool = False, tagged: bool = False
    ) -> Bench:
        """These are recorded, and nothing has passed yet.

        Args:
            each: compare counters and registers after every frame.
            tagged: each frame comes to the switch with a tag, of any priority, and goes out with it; the model knows
                nothing of it.
        """
        self._tagged = tagged
        model = ModelSwitch(NETWORK, PORTS, CONTROLLER, frozenset())

        def record(members: Recorded) -> None:
            switch.record({number: Member(number, mac, port) for number, mac, port in members})
            model.members = members

        def exchange(port: int, *frames: bytes) -> dict[int, list[bytes]]:
            heard = self.exchange(model, port, *frames)
            if each:
                self.agree(switch, model)
            return heard

        def forget() -> None:
            switch.forget_token()
            model.forget()

        switch.setup(NETWORK, PORTS, CONTROLLER)
        record(members)
        return Bench(model, exchange, record, forget)

    def exchange(self, model: ModelSwitch, port: int, *frames: bytes) -> dict[int, list[bytes]]:
        """Send frames; return what came out at each port, which is asserted to be what the model says."""
        mark = self._mark(port)
        sent: list[bytes] = []
        expected: dict[int, list[bytes]] = {}
        plain: dict[int, list[bytes]] = {}
        for data in [*(frame.ljust(60, b"\0") for frame in frames), mark]:
            reason, priority = model.reason, self._priority()
            sent.append(_put(data, priority))
            for to, out in model.take(port, data).items():
                expected.setdefault(to, []).append(_put(out, priority))
                plain.setdefault(to, []).append(out)
        model.reason = reason  # not that of the mark
        counts = {to: len(expected.get(to, ())) for to in (CONTROLLER, port)}
        heard = self._send(port, sent, counts)
        assert heard == expected, (port, [frame.hex() for frame in sent])
        return {to: [out for out in outs if out != mark] for to, outs in plain.items()}

    def _priority(self) -> int | None:
        """Of the next frame, if it is to have a tag."""
        self._tags += 1
        return self._tags % 8 if self._tagged else None

    def pass_on(self, port: int, frame: bytes) -> dict[int, list[bytes]]:
        """Send a frame; return what came out at the other hosts' ports. No model has a say."""
        mark, other = self._mark(port), port % len(PORTS) + 1
        heard = self._send(port, [frame, mark], {})
        self._send(
            other, [self._mark(other)], {}
        )  # what came back to the sender's port is out, too
        return {to: [out for out in outs if out != mark] for to, outs in heard.items()}

    def _mark(self, port: int) -> bytes:
        """A frame that is flooded: when it has come everywhere, all that was sent before it has."""
        self._marks += 1
        source = bytes([2, 0, 0, 0, 0, 0xF0 + port])
        return b"\xff" * 6 + source + struct.pack(">HQ", 0x88B7, self._marks).ljust(48)

    def _send(
        self, port: int, sent: Sequence[bytes], counts: Mapping[int, int]
    ) -> dict[int, list[bytes]]:
        """Send frames, the mark last; return what each port heard.

        The mark does not come to the controller, nor to the port that it was sent from: `counts`
        says how many frames are awaited there.
        """
        for data in sent:
            self.wires.send(port, data)
        marked = set(PORTS) - {CONTROLLER, port}
        heard: dict[int, list[bytes]] = {}
        deadline = time.monotonic() + WAIT_S

        def is_whole() -> bool:
            return all(heard.get(to, [b""])[-1] == sent[-1] for to in marked) and all(
                len(heard.get(to, ())) >= count for to, count in counts.items()
            )

        while not is_whole():
            assert time.monotonic() < deadline, (port, [frame.hex() for frame in sent], heard)
            self.wires.wait(0.1)
            for to, more in self.wires.heard().items():
                heard.setdefault(to, []).extend(more)
        return heard

    def agree(self, switch: Switch, model: ModelSwitch) -> None:
        """At the end: the same counters, the same token."""
        assert {k: v for k, v in switch.counters().items() if v} == dict(model.counters)
        assert switch.registers() == model.registers()


def _put(frame: bytes, priority: int | None) -> bytes:
    return frame if priority is None else encode.put_tag(frame, priority)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with bench(switch_name(f"test-{os.getpid()}-conform"), len(PORTS)) as (bmv2, wires):
        yield Rig(bmv2, wires)


@pytest.fixture(scope="module")
def switch(rig: Rig) -> Iterator[Switch]:
    with rig.bmv2.connect() as switch:
        yield switch


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(BLOCKS)
    yield target
    target.close()


@pytest.mark.parametrize("path", replay.SEQUENCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("adding", [False, True], ids=["ring", "adding"])
@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
def test_the_sequences_of_the_vectors(
    rig: Rig, switch: Switch, program: XdpTarget, path: Path, adding: bool, tagged: bool
) -> None:
    """The XDP program does what they say, and what the switch counts and adds means the same, step by step."""
    sequence = replay.load(path)
    program.begin(sequence["config"], replay.member_macs(sequence), replay.view_key(sequence))
    replay.replay(sequence, program)
    program.begin(sequence["config"], replay.member_macs(sequence), replay.view_key(sequence))
    bench = rig.begin(switch, frozenset(), each=True, tagged=tagged)
    switched.sequence_agrees(sequence, adding, bench, program)


def test_random_sequences(rig: Rig, switch: Switch, program: XdpTarget) -> None:
    reached: Counter[str] = Counter()

    @thousand
    @given(frames=switch_frames.sequences)
    def agrees(frames: list[tuple[int, switch_frames.Frame]]) -> None:
        program.begin(switched.CONFIG, switched.MACS)
        bench = rig.begin(switch, switch_frames.MEMBERS)
        reached.update(switched.frames_agree(frames, bench, program).reached())
        rig.agree(switch, bench.model)

    agrees()
    sums.reached_enough(reached, switch_frames.LEAST)


# ---- the same sums as hosts make


def sums_agree(
    rig: Rig, switch: Switch, program: XdpTarget, sequence: sums.Gradients
) -> Counter[str]:
    """Through BMv2, its model, the XDP program and its model."""
    bench = rig.begin(switch, sums.MEMBERS)

    def begin(config: Mapping[str, Any]) -> XdpTarget:
        program.begin(config, sums.MACS)
        return program

    reached = sums.sums_agree(sequence, begin, bench.model, bench.exchange)
    rig.agree(switch, bench.model)
    return reached


@pytest.mark.parametrize("width", [32, 16, 8])
def test_all_send(rig: Rig, switch: Switch, program: XdpTarget, width: int) -> None:
    reached = sums_agree(rig, switch, program, sums.all_send(width))
    assert reached["summed"] == sums.FRAGMENTS and reached["answered"] >= 3 * sums.FRAGMENTS


@pytest.mark.parametrize("forget", ["forget_token", "reset"])
def test_a_new_network_gets_no_old_sums(rig: Rig, switch: Switch, forget: str) -> None:
    """Its views and rounds have the same numbers again."""
    for first in (1, 100):
        members = {k: Member(k, sums.MACS[k - 1], k) for k in sums.SENDERS}
        if first == 1:
            rig.begin(switch, sums.MEMBERS)
        getattr(switch, forget)()
        switch.record(members)
        for step in sums.all_send().steps[: 3 * sums.FRAGMENTS : 3]:
            for hop, sender in enumerate(sums.SENDERS, 1):
                rig.pass_on(1, sums.token(sender, hop))
                payload = struct.pack(">i", first * sender) * 360
                frame = step.frame[:6] + sums.MACS[sender - 1] + step.frame[12:30]
                frame += struct.pack(">H", sender) + step.frame[32:62] + payload
                out = rig.pass_on(sender, frame)
            whole = [f for f in out[sums.HEARS] if f[15] == FRAGMENT]
            assert [struct.unpack_from(">i", f, 62)[0] for f in whole] == [6 * first]
            getattr(switch, forget)()
            switch.record(members)


def test_slots_are_used_again(rig: Rig, switch: Switch) -> None:
    """A fragment two quanta further on takes the slot, and begins a sum of its own; late ones do not come back."""
    send = rig.begin(switch, sums.MEMBERS).exchange
    send(1, sums.token(1, 1))
    heard: dict[int, list[int]] = {}
    for index in (0, SLOTS, 2 * SLOTS):
        for sender in sums.SENDERS:
            payload = np.full(360, 10 * sender + index, np.int64)
            # All send to the next slot too, and once more what was in this one.
            indices = [index, index + 1] + [index - SLOTS] * (index > 0)
            frames = [sums.fragment(sender, at, 32, payload) for at in indices]
            for out in send(sender, *frames).get(sums.HEARS, ()):
                if out[15] == FRAGMENT:
                    found = struct.unpack_from(">I", out, 46)[0]
                    heard.setdefault(found, []).append(struct.unpack_from(">i", out, 62)[0])
    assert heard == {
        index + next_: [60 + 3 * index] for index in (0, SLOTS, 2 * SLOTS) for next_ in (0, 1)
    }
    counted = {name: count for name, count in switch.counters().items() if count}
    marks = counted.pop("switched")
    assert marks and counted == {"token": 1, "added": 12, "summed": 6, "window": 6}


def test_random_sums(rig: Rig, switch: Switch, program: XdpTarget) -> None:
    reached: Counter[str] = Counter()

    @thousand
    @given(sequence=sums.sequences())
    def agrees(sequence: sums.Gradients) -> None:
        reached.update(sums_agree(rig, switch, program, sequence))

    agrees()
    sums.reached_enough(reached, sums.LEAST)
