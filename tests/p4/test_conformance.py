# SPDX-License-Identifier: Apache-2.0
"""BMv2 does with every frame what the model says: on the sequences of tests/vectors/, and on random ones.

And what it adds is what hosts add, by the XDP program (`tests.sums`).
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nicps.bench.bmv2 import CONTROLLER, Bmv2
from nicps.lab.namespaces import switch_name
from nicps.switch import Switch
from nicps.switch.runtime import Member
from tests import sums
from tests.p4.bmv2 import Wires, bench
from tests.p4.model import FRAGMENT, ModelSwitch
from tests.vectors import encode
from tests.xdp.target import XdpTarget

PORTS = (1, 2, 3)
NETWORK = 0x0A0B0C0D
SEQUENCES = sorted((Path(encode.__file__).parent / "sequences").glob("*.json"))
VLAN = (b"\x81\x00", b"\x88\xa8")
WAIT_S = 5.0
thousand = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def mac(number: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, number])


class Rig:
    """A switch, and the model of it: both get the same frames."""

    def __init__(self, bmv2: Bmv2, wires: Wires) -> None:
        self.bmv2, self.wires = bmv2, wires
        self._marks = 0

    def begin(self, switch: Switch, macs: Sequence[bytes]) -> ModelSwitch:
        """Member k is at port k, as far as there are ports; nothing has passed yet."""
        members = {k: Member(k, mac, k) for k, mac in enumerate(macs, 1) if k in PORTS and any(mac)}
        switch.setup(NETWORK, PORTS, CONTROLLER)
        switch.record(members)
        recorded = frozenset((m.number, m.mac, m.port) for m in members.values())
        return ModelSwitch(NETWORK, PORTS, CONTROLLER, recorded)

    def exchange(self, model: ModelSwitch, port: int, *frames: bytes) -> dict[int, list[bytes]]:
        """Frames, and behind them one that is flooded: when that has come everywhere, all else has.

        What came out at each port; asserts that it is what the model says.
        """
        self._marks += 1
        mark = b"\xff" * 6 + mac(0xF0 + port) + struct.pack(">HQ", 0x88B7, self._marks).ljust(48)
        sent = [*(frame.ljust(60, b"\0") for frame in frames), mark]
        expected: dict[int, list[bytes]] = {}
        for data in sent:
            for to, out in model.take(port, data).items():
                expected.setdefault(to, []).append(out)
            self.wires.send(port, data)
        heard: dict[int, list[bytes]] = {}
        deadline = time.monotonic() + WAIT_S

        def lacking() -> list[int]:
            """Ports where not all is out: the mark is the last thing, but does not come to these two."""
            unmarked = {CONTROLLER, port}
            marked = set(PORTS) - unmarked
            return [to for to in marked if heard.get(to, [b""])[-1] != mark] + [
                to for to in unmarked if len(heard.get(to, ())) < len(expected.get(to, ()))
            ]

        while lacking():
            assert time.monotonic() < deadline, (port, [frame.hex() for frame in sent], heard)
            for to, more in self.wires.heard().items():
                heard.setdefault(to, []).extend(more)
        assert heard == expected, (port, [frame.hex() for frame in sent])
        return {to: [out for out in outs if out != mark] for to, outs in heard.items()}

    def agree(self, switch: Switch, model: ModelSwitch) -> None:
        """At the end: the same counters, the same token."""
        assert {k: v for k, v in switch.counters().items() if v} == dict(model.counters)
        assert switch.registers() == model.registers()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with bench(switch_name(f"test-{os.getpid()}-conform"), len(PORTS)) as (bmv2, wires):
        yield Rig(bmv2, wires)


@pytest.fixture(scope="module")
def switch(rig: Rig) -> Iterator[Switch]:
    with rig.bmv2.connect() as switch:
        yield switch


@pytest.mark.parametrize("path", SEQUENCES, ids=lambda path: path.stem)
def test_the_sequences_of_the_vectors(rig: Rig, switch: Switch, path: Path) -> None:
    """Each frame at the port of the member whose MAC address it has; strangers at port 1."""
    sequence = json.loads(path.read_text())
    macs = [bytes.fromhex(text.replace(":", "")) for text in sequence["members"]]
    model = rig.begin(switch, macs)
    for step in sequence["steps"]:
        if "frame" not in step:
            continue
        frame = encode.from_text(step["frame"])
        if len(frame) < 14 or frame[12:14] in VLAN:
            continue  # no interface sends the one, and packet sockets take the other's tag off
        source = frame[6:12]
        port = macs.index(source) + 1 if source in macs else 1
        rig.exchange(model, port if port in PORTS else 1, frame[:1514])
    rig.agree(switch, model)


# ---- random frames

ports = st.sampled_from(PORTS)
numbers = st.integers(0, 4)
views = st.sampled_from([0, 2, 3, 3, 3, 3, 4, 0xFFFFFFFF])


@st.composite
def frames(draw: st.DrawFn) -> tuple[int, bytes]:
    """(port, frame): mostly of a member at its own port, and mostly whole."""
    sender = draw(st.sampled_from([1, 2, 3, 1, 2, 3, 0, 4, 0x0102]))
    port = sender if sender in PORTS and draw(st.integers(0, 5)) else draw(ports)
    source = mac(sender & 0xFF) if draw(st.integers(0, 7)) else mac(draw(st.integers(1, 9)))
    header: dict[str, Any] = {
        "network": NETWORK if draw(st.integers(0, 15)) else NETWORK ^ 1,
        "view": draw(views),
        "round": 7,
        "sender": sender,
        "sequence": 1,
    }
    kind = draw(
        st.sampled_from(["token"] * 4 + ["fragment"] * 4 + ["want", "view", "other", "odd"])
    )
    if kind == "other":
        to = draw(st.sampled_from([b"\xff" * 6, mac(1), mac(2), mac(3), mac(7)]))
        return port, to + source + b"\x08\x00" + draw(st.binary(min_size=46, max_size=80))
    if kind == "token":
        members = 3 if draw(st.integers(0, 9)) else draw(st.integers(0, 5))
        body: list[tuple[str, Any]] = [
            (
                "token",
                {
                    "generation": draw(st.sampled_from([1, 1, 1, 2, 0xFFFFFFFF])),
                    "hop": draw(st.integers(0, 6)),
                    "owner": draw(numbers),
                    "members": members,
                    "listed": draw(st.sampled_from([0, 0b111, 0b111, 0b101, 0b011])),
                    "settled": draw(st.sampled_from([0, 0, 0, 2, 600])),
                },
            ),
            *([("entry", {})] * (3 if draw(st.integers(0, 9)) else members)),
        ]
        header["flags"] = draw(st.sampled_from([0, 0, 0, 1, 2, 4]))
    elif kind == "fragment":
        fields = {
            "index": draw(st.sampled_from([0, 0, 0, 1, 2, 3, 512])),
            "fragments": draw(st.sampled_from([4, 1000, 1000])),
            "width": draw(st.sampled_from([32, 32, 32, 16, 8, 0, 33])),
            "shift": draw(st.sampled_from([0, 0, 0, 0, 0, 3])),
        }
        header |= {"flags": draw(st.sampled_from([encode.ADD, encode.ADD, 0, encode.ADD | 8]))}
        header |= {"round": draw(st.sampled_from([7, 7, 7, 7, 8]))}
        body = [("fragment", fields)]
    elif kind == "view":
        body = [("view", {"step": draw(st.integers(0, 4)), "number": 4})]
    else:
        body = [("want", {"ready": 3})]
        if kind == "odd":
            header["type"] = draw(st.integers(0, 255))
            header["version"] = draw(st.sampled_from([1, 1, 0, 2]))
    tail = b""
    if kind == "fragment":
        piece = draw(st.binary(min_size=8, max_size=24))
        tail = (piece * (1440 // len(piece) + 1))[:1440]
    if not draw(st.integers(0, 9)):
        header["length"] = draw(st.integers(0, 1500))
    data = encode.frame(header, *body, tail=tail)
    if not draw(st.integers(0, 9)):
        data = data[: draw(st.integers(0, len(data)))]
    return port, encode.ethernet(source.hex(":"), data)


@thousand
@given(sequence=st.lists(frames(), min_size=1, max_size=14))
def test_random_sequences(rig: Rig, switch: Switch, sequence: list[tuple[int, bytes]]) -> None:
    model = rig.begin(switch, [mac(k) for k in PORTS])
    for port, frame in sequence:
        rig.exchange(model, port, frame)
    rig.agree(switch, model)


# ---- the same sums as hosts make


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(sums.FRAGMENTS)
    yield target
    target.close()


def sums_agree(
    rig: Rig, switch: Switch, program: XdpTarget, sequence: sums.Gradients
) -> Counter[str]:
    """Through BMv2, its model, the XDP program and its model."""
    rig.begin(switch, sums.MACS)
    model = sums.model_switch(CONTROLLER)

    def begin(config: Mapping[str, Any]) -> XdpTarget:
        program.begin(config, sums.MACS)
        return program

    reached = sums.sums_agree(sequence, begin, model, partial(rig.exchange, model))
    rig.agree(switch, model)
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
            rig.begin(switch, sums.MACS)
        getattr(switch, forget)()
        switch.record(members)
        for step in sums.all_send().steps[: sums.FRAGMENTS]:
            for hop, sender in enumerate(sums.SENDERS, 1):
                rig.wires.exchange(1, sums.token(sender, hop), wait_s=0.02)
                payload = struct.pack(">i", first * sender) * 360
                frame = step.frame[:6] + sums.MACS[sender - 1] + step.frame[12:30]
                frame += struct.pack(">H", sender) + step.frame[32:62] + payload
                out = rig.wires.exchange(sender, frame, wait_s=0.05)
            whole = [f for f in out[sums.HEARS] if f[15] == FRAGMENT]
            assert [struct.unpack_from(">i", f, 62)[0] for f in whole] == [6 * first]
            getattr(switch, forget)()
            switch.record(members)


def test_random_sums(rig: Rig, switch: Switch, program: XdpTarget) -> None:
    reached: Counter[str] = Counter()

    @thousand
    @given(sequence=sums.sequences())
    def agrees(sequence: sums.Gradients) -> None:
        reached.update(sums_agree(rig, switch, program, sequence))

    agrees()
    sums.reached_enough(reached)
