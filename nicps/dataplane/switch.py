# SPDX-License-Identifier: Apache-2.0
"""The data plane of a Linux switch that adds (docs/linux-switch.md): its XDP program, its memory, its ports."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from nicps import wire
from nicps.barrier import barrier
from nicps.dataplane import bpf, inner, loader, xdp
from nicps.dataplane.doorbell import Ring
from nicps.dataplane.inner import Wanted
from nicps.dataplane.maps import KEY_BYTES
from nicps.dataplane.switchports import PortChange, SwitchPorts
from nicps.layout import layout

SOURCE = "nicps_switch.c"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TooLong:
    """Contributions to vectors of so many fragments come, and there is no room for them; reported once for each
    size.
    """

    fragments: int


@dataclass(frozen=True, slots=True)
class OtherView:
    """Contributions or questions of that view come, and it is not in force here; reported once for each view."""

    view: int


@dataclass(frozen=True, slots=True)
class Version:
    """The fields of a contribution about its sum: the list (bit number - 1), size, unit, and the round of the
    remainder.
    """

    members: int
    fragments: int
    unit: int
    view: int
    behind: int


@dataclass(frozen=True, slots=True)
class Differing:
    """A contribution was refused because its fields differ from those of the first one; reported once for a round.

    Attributes: `sender`, of the refused contribution; `first`, the fields of the first one; `refused`, those of the
    refused one.
    """

    view: int
    round: int
    index: int
    sender: int
    first: Version
    refused: Version


Message = TooLong | OtherView | Differing


@dataclass(frozen=True, slots=True)
class SwitchRoom:
    """Memory for vectors of `fragments` fragments of lanes of `width` bits, all zero, which is not in use yet."""

    fragments: int
    width: int
    places_fd: int
    blocks_fd: int
    sums_fd: int

    def close(self) -> None:
        """Free it, unused."""
        for fd in (self.places_fd, self.blocks_fd, self.sums_fd):
            os.close(fd)


class SwitchPlane:
    """The XDP program `nicps_switch` on the ports of a bridge, and its maps.

    All of it goes with `close`, or with the process, however the process ends. The switch adds for no member until
    `enter_view`, and has no room until `grow`.

    Args:
        ports: names of the interfaces, in this process's network namespace. They may be down.
        network: the hash of the network's name (`wire.network_id`).
        ethertype: of our frames.
        destination: of sums: all hosts, or a multicast group (6 bytes).

    Attributes:
        ports: those that the program is on, and its mode.
        room: the room, as fragments of a vector and bits of a lane; (0, 0) before the first `grow`.
        view, seed: of the list in force; None if there is none.

    Raises:
        UsageProblem, InterfaceMissing, InterfaceUnfit, InterfaceBusy: as `SwitchPorts`.
        NotRoot, KernelHeadersMissing, BpfLoadError: as `loader.load`.
    """

    def __init__(
        self,
        ports: Sequence[str],
        network: int,
        *,
        ethertype: int = wire.ETHERTYPE,
        destination: bytes = wire.BROADCAST,
    ) -> None:
        with contextlib.ExitStack() as undo:
            defines = {"NICPS_ETHERTYPE": ethertype}
            loaded = loader.load(SOURCE, {xdp.SWITCH_PROGRAM: "xdp"}, defines)
            undo.callback(loaded.close)
            self.maps = SwitchMaps(loaded.maps)
            undo.callback(self.maps.close)
            self.maps.config["network"] = network
            self.maps.config["everybody"] = np.frombuffer(destination, np.uint8)
            self.ports = SwitchPorts(
                loaded.programs[xdp.SWITCH_PROGRAM], loaded.maps["ports"], ports
            )
            undo.callback(self.ports.close)
            self._undo = undo.pop_all()
        _log.info("XDP program on %s in %s mode", ", ".join(ports), self.ports.mode)

    def __enter__(self) -> SwitchPlane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the program off the ports and close everything; a second call does nothing."""
        self._undo.close()

    # ---- ports

    def ports_fileno(self) -> int:
        """Readable when an interface of this namespace has changed: then call `check_ports`."""
        return self.ports.changes.fileno()

    def check_ports(self) -> list[PortChange]:
        """Detach ports that have gone, and attach those that are back; return the changes since the last call."""
        return self.ports.check()

    # ---- the view and the memory

    @property
    def view(self) -> int | None:
        """Number of the view in force."""
        return self.maps.view

    @property
    def seed(self) -> bytes | None:
        """The seed of the list in force."""
        return self.maps.seed

    @property
    def room(self) -> tuple[int, int]:
        """Fragments of a vector, and bits of a lane."""
        return self.maps.room

    @property
    def sequence(self) -> int:
        """Frames that were signed with the key in force; at 2^32 no more are sent until there is another key."""
        return self.maps.sequence

    def enter_view(
        self, view: int, seed: bytes, members: Mapping[int, bytes], key: bytes | None
    ) -> None:
        """`SwitchMaps.enter_view`"""
        self.maps.enter_view(view, seed, members, key)

    def leave_view(self) -> None:
        """`SwitchMaps.leave_view`"""
        self.maps.leave_view()

    @staticmethod
    def memory(fragments: int, width: int) -> int:
        """Bytes of the kernel's memory that such a room takes."""
        return sum(
            entries * layout().records[record].itemsize
            for record, entries in _sizes(fragments, width).items()
        )

    def reserve(self, fragments: int, width: int) -> SwitchRoom:
        """`SwitchMaps.reserve`"""
        return self.maps.reserve(fragments, width)

    def use(self, reserved: SwitchRoom) -> None:
        """`SwitchMaps.use`"""
        self.maps.use(reserved)

    def grow(self, fragments: int, width: int) -> None:
        """`reserve` and `use`: from now on there is room for such vectors, and all places are empty.

        If there was a room before, sums and remainders may be lost with it. Then no view is in force afterwards, and
        the caller must begin another boot. Takes 0.05 s, and 0.5 s more for each GB; `reserve` may be called in another
        thread.

        Raises:
            EnvironmentProblem: there is not enough memory; nothing has changed.
        """
        self.use(self.reserve(fragments, width))

    # ---- events

    def fileno(self) -> int:
        """Readable while `messages` would return something."""
        return self.maps.doorbell.fileno()

    def messages(self) -> list[Message]:
        """The program's messages since the last call, oldest first; at most ten of each kind a second."""
        return [read_message(record) for record in self.maps.doorbell.read()]

    def counters(self) -> dict[str, int]:
        """Counts of contributions and questions by outcome (`enum nicps_count`), since the program was loaded."""
        return self.maps.counters()


class SwitchMaps:
    """Views of the maps of `nicps_switch`.

    Args:
        fds: the maps' descriptors by name; the caller keeps them open as long as this lives.

    Attributes: `doorbell`, the program's messages, `struct nicps_message`; `view` and `seed`, of the list in force.
    """

    def __init__(self, fds: Mapping[str, int]) -> None:
        self._fds = fds
        records = layout().records
        self._config = self._view("config", records["switch_config"])
        self._members = self._view("members", records["member"])
        self._key = self._view("view_key", records["key"])
        self._windows = self._view("windows", records["window"])
        self._outgoing = self._view("outgoing", records["outgoing"])
        self._told = self._view("told", records["told"])
        self._counters = self._view("counters", np.dtype(np.uint64))
        self.doorbell = Ring(fds["doorbell"], records["message"])
        self._swapping = threading.Lock()
        self._reserved: SwitchRoom | None = None
        self._keys: set[bytes] = set()
        self.view: int | None = None
        self.seed: bytes | None = None
        self._members["mac"][0] = np.frombuffer(wire.SWITCH, np.uint8)

    def _view(self, name: str, dtype: np.dtype[Any]) -> Any:
        entries = bpf.map_info(self._fds[name]).entries
        return np.frombuffer(bpf.map_memory(self._fds[name]), dtype, entries)

    @property
    def config(self) -> Any:
        """The program's settings: read and assign by name."""
        return self._config[0]

    @property
    def room(self) -> tuple[int, int]:
        """Fragments of a vector, and bits of a lane."""
        used = self._reserved
        return (used.fragments, used.width) if used is not None else (0, 0)

    @property
    def sequence(self) -> int:
        """Frames that were signed with the key in force."""
        return int(self._outgoing["answers"][0])

    def enter_view(
        self, view: int, seed: bytes, members: Mapping[int, bytes], key: bytes | None
    ) -> None:
        """Add for these members from now on. No frame of another view counts for this one.

        The program takes no frames while this works (20 to 60 ms). Runs that are under way end, with the former key and
        windows, before anything changes.

        Args:
            view: its number.
            seed: the one that was agreed on with the view: together with the number it names the list.
            members: MAC addresses (6 bytes) of the live members, by number from 1; at least two.
            key: SipHash's of the view, 16 bytes; None in a network without a key. Numbers start again with it.

        Raises:
            ValueError: an argument is not valid; or the key was in force before, and another since: frames that were
                signed with it would be taken again.
        """
        numbers = set(members)
        if len(members) < 2 or numbers - set(range(1, wire.MAX_MEMBERS + 1)):
            raise ValueError(
                f"a list has from 2 to {wire.MAX_MEMBERS} members, not {sorted(numbers)}"
            )
        if any(len(mac) != 6 or not any(mac) for mac in members.values()):
            raise ValueError("a MAC address has 6 bytes, not all zero")
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a view's key has {KEY_BYTES} bytes, not {len(key)}")
        in_force = bool(self.config["keyed"]) and self._key["word"].tobytes() == key
        if key is not None and key in self._keys and not in_force:
            raise ValueError("a key that was in force before is not put in force again")
        table = np.zeros((len(self._members), 6), np.uint8)
        for number, mac in {0: wire.SWITCH, **members}.items():
            table[number] = np.frombuffer(mac, np.uint8)
        with self._swapping:
            self._disable()
            self._members["mac"] = table
            if not in_force:
                self._windows[...] = np.zeros((), self._windows.dtype)
                self._outgoing[...] = np.zeros((), self._outgoing.dtype)
                self._key["word"] = np.frombuffer(key or bytes(KEY_BYTES), "<u8")
            config = self.config
            config["keyed"] = int(key is not None)
            config["live_members"] = sum(1 << number - 1 for number in members)
            config["view"] = view
            self._told["last"][layout().limits["TOLD_VIEW"]] = 0
            self.view, self.seed = view, seed
            if key is not None:
                self._keys.add(key)
            self._quiesce()  # a run that finds `enabled` set sees all of that
            config["enabled"] = 1

    def leave_view(self) -> None:
        """Add for no member until `enter_view`; returns when all runs of the program have ended."""
        with self._swapping:
            self._leave()

    def _leave(self) -> None:
        self._disable()
        self._told["last"][layout().limits["TOLD_VIEW"]] = 0
        self.view = self.seed = None

    def _disable(self) -> None:
        self.config["enabled"] = 0
        barrier()
        self._quiesce()

    def _quiesce(self) -> None:
        """Return when every run of the program that saw the former settings has ended, at all ports."""
        used = self._reserved
        inner.put(self._fds["places"], used.places_fd if used else self._fds["places_shape"])

    def reserve(self, fragments: int, width: int) -> SwitchRoom:
        """New memory for `use`: that takes long, and may be done in another thread.

        Raises:
            EnvironmentProblem: there is not enough memory.
        """
        if width not in (8, 16, 32) or fragments < 1:
            raise ValueError(f"no room is for {fragments} fragments of lanes of {width} bits")
        shapes = {"place": "places_shape", "block": "blocks_shape", "lanes": "sums_shape"}
        wanted = tuple(
            Wanted(f"nicps_{record}", shapes[record], entries)
            for record, entries in _sizes(fragments, width).items()
        )
        return SwitchRoom(fragments, width, *inner.make(self._fds, wanted, "places of a switch"))

    def use(self, reserved: SwitchRoom) -> None:
        """From now on the program adds in this memory; all places are empty.

        If there was a room before, no view is in force afterwards, because sums that a member still lacks may be lost
        with it. The program takes no frames while this works (40 to 120 ms).
        """
        with self._swapping:
            before = self._reserved
            if before is not None:
                self._leave()
            inner.swap(self._config, self._swap(reserved))
            self._reserved = reserved
            if before is not None:
                before.close()

    def _swap(self, reserved: SwitchRoom) -> Iterator[list[inner.Place]]:
        yield [(self._fds["places"], reserved.places_fd)]
        self.config["room"], self.config["width"] = reserved.fragments, reserved.width
        self._told["last"][layout().limits["TOLD_ROOM"]] = 0
        yield [(self._fds["blocks"], reserved.blocks_fd), (self._fds["sums"], reserved.sums_fd)]

    def counters(self) -> dict[str, int]:
        """Counts of frames by outcome."""
        return dict(zip(layout().counters, self._counters.tolist(), strict=True))

    def close(self) -> None:
        """Close the maps that are as large as vectors."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def _sizes(fragments: int, width: int) -> dict[str, int]:
    """The number of records of each kind in such a room; both places of a fragment."""
    places, each = layout().limits["PLACES"], wire.fragments_per_block(width)
    blocks = -(-fragments // each)
    return {"place": places * fragments, "block": places * blocks, "lanes": places * fragments}


def read_message(record: Any) -> Message:
    """The message in a record of the doorbell (`struct nicps_message`)."""
    limits = layout().limits
    view, round_ = divmod(int(record["tag"]), 1 << 32)
    if record["kind"] == limits["TOLD_ROOM"]:
        return TooLong(int(record["fragments"][1]))
    if record["kind"] == limits["TOLD_VIEW"]:
        return OtherView(view)
    units = record["unit"].view(np.int8)
    first, refused = (
        Version(
            int(record["members"][at]),
            int(record["fragments"][at]),
            int(units[at]),
            int(record["number"][at]),
            int(record["behind"][at]),
        )
        for at in range(2)
    )
    return Differing(view, round_, int(record["index"]), int(record["sender"]), first, refused)
