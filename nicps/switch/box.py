# SPDX-License-Identifier: Apache-2.0
"""A Linux box whose bridge adds: the state machine (`nicps.switch.adding`) on sockets, ports and maps."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nicps import wire
from nicps.dataplane import loader
from nicps.dataplane.switch import Differing, Message, OtherView, SwitchPlane, TooLong, Version
from nicps.dataplane.tap import Sender, Tap
from nicps.errors import EnvironmentProblem, InterfaceDown, UsageProblem
from nicps.protocol.view import numbers
from nicps.switch.adding import Adding, NoRoom
from nicps.switch.grants import Granted
from nicps.switch.ports import check_ports, read_ports
from nicps.switchauth import SwitchKey

_TYPES = (wire.FrameType.VIEW, wire.FrameType.SWITCH)
_MOST_S = 1.0  # between checks for changes
_LEAST_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class BoxSettings:
    """`ports`: names. `bridge`: the one that they must be in. `memory`: bytes for sums; None: half of the free
    memory.
    """

    ports: tuple[str, ...]
    bridge: str | None = None
    network: str = "nicps"
    key: Path | None = None
    memory: int | None = None


class Box:
    """The switch, on its ports; a context manager. Nothing of it is left when it is closed, or its process ends.

    Args:
        say: gets a line for the user.

    Raises:
        NicpsError: the ports, the key, the memory or this machine cannot serve; nothing has been attached then.
    """

    def __init__(self, settings: BoxSettings, say: Callable[[str], None]) -> None:
        if settings.memory is not None and settings.memory < _LEAST_MEMORY:
            raise UsageProblem(f"--memory takes 1M at least, not {settings.memory} bytes")
        loader.need_root()
        key = SwitchKey.read(settings.key) if settings.key is not None else None
        bridge = check_ports(settings.ports, settings.bridge)
        self._say = say
        self._names, self._bridge = settings.ports, bridge.index
        self._memory = settings.memory or free_memory() // 2
        network = wire.network_id(settings.network)
        with contextlib.ExitStack() as undo:
            self.plane = SwitchPlane(settings.ports, network)
            undo.callback(self.plane.close)
            self._tap = Tap(wire.ETHERTYPE, _TYPES)
            undo.callback(self._tap.close)
            self._sender = Sender(bridge, wire.ETHERTYPE, wire.SWITCH)
            undo.callback(self._sender.close)
            self._adding = Adding(self, network, time.time_ns(), key)
            self._seen = read_ports(self._names, self._bridge)
            self._undo = undo.pop_all()
        mode, keyed = self.plane.ports.mode, ", with a key" if key is not None else ""
        say(
            f"the bridge {bridge.name} adds for {settings.network} on {', '.join(settings.ports)} ({mode} XDP){keyed};"
            f" up to {self._memory / 1e6:,.0f} MB for sums"
        )
        if mode != "native":
            say("WARNING: not all ports take XDP programs in native mode: generic mode is slower")
        for name, port in self._seen.items():
            if not port.carrier:
                say(f"port {name} has no carrier")

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the program off all ports."""
        self._undo.close()

    def step(self, *wake: Any) -> None:
        """Wait for something to do, or for one of these descriptors to be readable, and do it."""
        now = time.monotonic()
        wait_s = self._adding.wait(now, _MOST_S)
        watched = [self._tap, self.plane, self.plane.ports_fileno(), *wake]
        ready, _, _ = select.select(watched, [], [], wait_s)
        now = time.monotonic()
        if self.plane.ports_fileno() in ready:
            self._check_ports()
        for port, source, frame in self._tap.receive():
            if port in self._seen:
                self._adding.on_frame(now, source, frame)
        for message in self.plane.messages():
            self._on_message(now, message)
        for frame in self._adding.frames(now):
            with contextlib.suppress(InterfaceDown):  # frames that were not sent are sent again
                self._sender.send(frame)
        for line in self._adding.lines(now):
            self._say(line)

    def counters(self) -> Mapping[str, int]:
        """Counts of frames and grants by outcome."""
        refused = {f"grants_{why}": count for why, count in sorted(self._adding.refused.items())}
        return {**self.plane.counters(), **refused}

    # ---- Places

    def grow(self, fragments: int, width: int) -> None:
        """`Places.grow`"""
        needed = self.plane.memory(fragments, width)
        asked = f"{fragments:,} fragments of lanes of {width} bits need {needed / 1e6:,.0f} MB"
        if needed > self._memory:
            raise NoRoom(f"{asked}, and --memory allows {self._memory / 1e6:,.0f} MB")
        try:
            self.plane.grow(fragments, width)
        except EnvironmentProblem as problem:
            raise NoRoom(f"{asked}: {problem}") from None
        self._say(asked.replace(" need ", " take "))

    def enter_view(self, granted: Granted) -> None:
        """`Places.enter_view`"""
        self.plane.enter_view(granted.number, granted.seed, granted.live, granted.siphash)

    def leave_view(self) -> None:
        """`Places.leave_view`"""
        self.plane.leave_view()

    # ---- events

    def _check_ports(self) -> None:
        """Ports may have come or gone."""
        for change in self.plane.check_ports():
            if change.mode is None:
                self._say(f"port {change.name} is gone: {change.reason}")
            else:
                self._say(f"port {change.name} is there again ({change.mode} XDP)")
        before, self._seen = self._seen, read_ports(self._names, self._bridge)
        for name in self._names:
            then, now = before.get(name), self._seen.get(name)
            if now is None and then is not None and name in self.plane.ports.attached:
                self._say(f"port {name} is not in the bridge any more")
            elif now is not None and not now.carrier and (then is None or then.carrier):
                self._say(f"port {name} has no carrier")
            elif now is not None and now.carrier and then is not None and not then.carrier:
                self._say(f"port {name} has its carrier back")

    def _on_message(self, now: float, message: Message) -> None:
        """The XDP program has sent messages."""
        if isinstance(message, OtherView):
            self._adding.hear_of(now, message.view)
        elif isinstance(message, TooLong):
            self._say(
                f"dropped contributions to {message.fragments:,} fragments, for which there is no room"
            )
        elif isinstance(message, Differing):
            where = f"view {message.view}, round {message.round}, fragment {message.index}"
            self._say(
                f"WARNING: {where}: member {message.sender} says {_describe(message.refused)}, and the first"
                f" contribution {_describe(message.first)}: dropped"
            )


def free_memory() -> int:
    """Bytes that this machine has free, as the kernel estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise EnvironmentProblem("/proc/meminfo tells no MemAvailable: give --memory")


def _describe(version: Version) -> str:
    """The fields of a contribution about its sum."""
    members = ", ".join(map(str, sorted(numbers(version.members))))
    rest = f"remainder of {version.behind} rounds before in view {version.view}"
    return (
        f"members {members}, {version.fragments} fragments, unit {version.unit}, "
        f"{rest if version.behind else 'no remainder'}"
    )
