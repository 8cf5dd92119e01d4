# SPDX-License-Identifier: Apache-2.0
"""The data plane of one interface: the XDP program on it, its maps, and the ways in and out."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

import numpy as np

from nicps import wire
from nicps.dataplane import bpf, direct, egress, htb, loader, tags, xdp
from nicps.dataplane.doorbell import Doorbell
from nicps.dataplane.interface import LinkChanges, current_name, still_usable, usable
from nicps.dataplane.maps import Maps
from nicps.dataplane.packet import PacketSocket
from nicps.dataplane.txring import TxRing
from nicps.layout import layout

#: The programs that take frames of stripes and of servers, once one of them is loaded.
_STRIPES, _SERVERS = "nicps_stripes", "nicps_servers"
#: Slots of a channel's ring: more than its window.
_CHANNEL_FRAMES = 128
#: What a host that serves and trains runs for its own part.
_OWN = "nicps_serve_own"
#: Of direct calls: the program that takes their frames, and the one that checks those of training programs.
_DIRECT, _CONFINED = "nicps_direct", "nicps_confined"
_LATER: dict[str, loader.ProgramKind] = {
    _STRIPES: "xdp",
    _DIRECT: "xdp",
    _CONFINED: "sched_cls",
}

_log = logging.getLogger(__name__)


class DataPlane:
    """Our XDP program on an interface, its maps, and frames in and out.

    All of it goes with `close`, or with the process, however the process ends.

    The program starts with `maps.config["enabled"] == 0`: control frames come up, tokens and fragments are dropped.

    Args:
        iface: the interface's name, in this process's network namespace.
        network: the hash of the network's name (`wire.network_id`).
        ethertype: of our frames.
        destination: of the frames that this host sends: all hosts, or a multicast group (6 bytes).
        keyed: the network has a key: tokens and fragments are signed on their way out. `enter_view` then needs one.
        tagged: the frames of this host have an 802.1p tag (`tags`). Frames of others are taken with one and without.
        shape_bps: put the frames of this host in order, at that rate for all programs together (`htb`).

    Raises:
        InterfaceMissing, InterfaceDown, InterfaceUnfit: the interface cannot serve.
        InterfaceBusy: another agent's XDP program, or an unknown one, is on it.
        NotRoot, KernelHeadersMissing, BpfLoadError: as `loader.load`.
    """

    def __init__(
        self,
        iface: str,
        network: int,
        *,
        ethertype: int = wire.ETHERTYPE,
        destination: bytes = wire.BROADCAST,
        keyed: bool = False,
        tagged: bool = False,
        shape_bps: int | None = None,
    ) -> None:
        programs: dict[str, loader.ProgramKind] = {xdp.PROGRAM: "xdp"}
        if keyed:
            programs[egress.PROGRAM] = "sched_cls"
        with contextlib.ExitStack() as undo:
            interface = usable(iface)
            loader.need_root()
            xdp.clear(interface)
            if egress.clear(interface):
                _log.warning("took away the filter that an older run left on %s", iface)
            defines = self._defines = {"NICPS_ETHERTYPE": ethertype}
            loaded = loader.load("nicps.c", programs, defines, later=_LATER)
            undo.callback(loaded.close)
            direct.freeze(loaded.maps)
            self.maps = Maps(loaded.maps)
            undo.callback(self.maps.close)
            self.maps.config["network"] = network
            seal = bytes((2, *os.urandom(5)))  # a unicast address that no host has
            self.maps.config["seal"] = np.frombuffer(seal, np.uint8)
            self.maps.config["everybody"] = np.frombuffer(destination, np.uint8)
            self.doorbell = Doorbell(loaded.maps["doorbell"])
            self.maps.config["tags"] = int(tagged)
            self.maps.config["iface"] = interface.index
            tag = tags.tag(tags.control()) if tagged else b""
            self._packets = PacketSocket(
                interface, ethertype, destination, seal=seal, priority=htb.CONTROL, tag=tag
            )
            undo.callback(self._packets.close)
            self.link_changes = LinkChanges(interface.index)
            undo.callback(self.link_changes.close)
            self.tx = TxRing(interface, ethertype, destination, tagged=tagged)
            undo.callback(self.tx.close)
            if keyed:
                detach, mode = egress.attach(loaded.programs[egress.PROGRAM], interface)
                undo.callback(detach)
                _log.info("egress program on %s by %s", iface, mode)
            link, self.mode = xdp.attach(loaded.programs[xdp.PROGRAM], interface)
            undo.callback(os.close, link)
            # A veth can receive in threads only while it has an XDP program.
            if htb.clear(interface):
                _log.warning("took away the classes that an older run left on %s", iface)
            if shape_bps is not None:
                undo.callback(htb.shape(interface, shape_bps))
            self._undo = undo.pop_all()
        self._loaded = loaded
        self._opening = threading.Lock()
        self._rooms: dict[str, int] = {}
        self._room = ""
        self._beside: loader.Loaded | None = None
        self.keyed = keyed
        self.iface = iface
        self._ifindex = interface.index
        self._interface, self._frames = interface, (ethertype, destination)
        self._tagged = tagged
        self.mac = interface.mac
        _log.info("XDP program on %s in %s mode", iface, self.mode)

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the program off the interface and close everything; a second call does nothing."""
        with self._opening:
            self._undo.close()

    def open_ring(self, urgency: int, *, tagged: bool | None = None) -> TxRing:
        """One more ring, for frames of that urgency; the caller closes it.

        Args:
            tagged: with 802.1p tags; by default as all frames of this host.

        Raises:
            OSError: there is no room for it.
        """
        interface = replace(self._interface, name=current_name(self._ifindex, self.iface))
        tagged = self._tagged if tagged is None else tagged
        return TxRing(interface, *self._frames, _CHANNEL_FRAMES, urgency, tagged=tagged)

    def open_stripes(self) -> None:
        """From now on take frames of stripes, if the view has aggregators; before, they are dropped as `mode`.

        Takes 0.15 s the first time, and may be called in any thread; only `close` waits for it.

        Raises:
            BpfLoadError: the kernel refuses the program.
        """
        with self._opening:
            self._go_on_with(_STRIPES, lambda: self._loaded)

    def open_direct(self) -> None:
        """From now on take frames of direct calls, on the channels that have them. As `open_stripes`.

        Raises:
            BpfLoadError: the kernel refuses a program.
        """
        with self._opening:
            if not self._loaded.maps or _CONFINED in self._rooms:
                return
            for name in (_DIRECT, _CONFINED):
                self._open(name, self._loaded)
            self._put_into("ROOM_DIRECT", _DIRECT)

    def share_direct(self) -> direct.DirectCalls | None:
        """After `open_direct`: an interface and memory for a training program, which the caller closes.

        Raises:
            EnvironmentProblem: as `DirectCalls`.
        """
        program = self._rooms.get(_CONFINED)
        return direct.DirectCalls(self._loaded.maps, program) if program is not None else None

    def open_servers(self) -> None:
        """From now on take frames of servers in place of those of stripes; `maps.servers` has their maps.

        The first time it takes 0.2 s, and 5 to 10 s once after the machine has started, as it is compiled then. It may
        be called in any thread, as `open_stripes`.

        Raises:
            KernelHeadersMissing, BpfLoadError: as `loader.load_beside`.
        """
        with self._opening:
            self._go_on_with(_SERVERS, self._load_servers)

    def _load_servers(self) -> loader.Loaded:
        if self._beside is None:
            kinds: dict[str, loader.ProgramKind] = {_SERVERS: "xdp", _OWN: "xdp"}
            source = "nicps_servers.c"
            beside = self._beside = loader.load_beside(self._loaded, source, kinds, self._defines)
            self._undo.callback(beside.close)
            self.maps.add_servers(beside.maps)
        return self._beside

    def open_own(self) -> None:
        """After `open_servers`: this host trains on parameters of which it holds a part. As `open_servers`.

        Raises:
            BpfLoadError: the kernel refuses the program.
        """
        with self._opening:
            if self._beside is not None:
                self._open(_OWN, self._beside)

    def serve_own(self, frame: bytes, count: int) -> None:
        """Let `count` fragments of the own step, or own questions, have their effect on the own part (docs/servers.md).

        Args:
            frame: the first of them, as it would be sent, and its body once more behind that.
        """
        with contextlib.suppress(InterruptedError):  # what is left out is asked for again
            bpf.prog_test_run(self._rooms[_OWN], frame, count)

    def _go_on_with(self, name: str, load: Callable[[], loader.Loaded]) -> None:
        """Put that program into the slot for the exchange; it is loaded once."""
        if name == self._room or not self._loaded.maps:  # or all is closed
            return
        if name not in self._rooms:
            self._open(name, load())
        self._put_into("ROOM_EXCHANGE", name)
        self._room = name

    def _open(self, name: str, loaded: loader.Loaded) -> None:
        """Load that program, unless it is; it goes with `close`."""
        if name in loaded.later:
            self._rooms[name] = program = loaded.open(name)
            self._undo.callback(os.close, program)
            del loaded.later[name]

    def _put_into(self, room: str, name: str) -> None:
        place = layout().limits[room].to_bytes(4, sys.byteorder)
        # The kernel empties the map once no process has it open.
        rooms = self._loaded.maps["nicps_rooms"]
        bpf.map_update(rooms, place, self._rooms[name].to_bytes(4, sys.byteorder))

    def set_key(self, key: bytes | None) -> None:
        """`Maps.set_key`"""
        self._check_key(key)
        self.maps.set_key(key)

    def enter_view(
        self,
        view: int,
        number: int,
        members: Sequence[bytes | None],
        successor: int,
        key: bytes | None = None,
    ) -> None:
        """`Maps.enter_view`"""
        self._check_key(key)
        self.maps.enter_view(view, number, members, successor, key)

    def _check_key(self, key: bytes | None) -> None:
        if (key is not None) != self.keyed:
            raise ValueError(
                f"a key is given: {key is not None}; the network has one: {self.keyed}"
            )

    def check_interface(self) -> None:
        """Check that the interface can still carry our frames, under its present name.

        Raises:
            InterfaceDown, InterfaceUnfit: it cannot now.
            InterfaceMissing: it no longer exists.
        """
        self.iface = current_name(self._ifindex, self.iface)
        still_usable(self.iface)

    def rx_fileno(self) -> int:
        """Readable when `receive` would return frames."""
        return self._packets.fileno()

    def receive(self) -> list[tuple[bytes, bytes]]:
        """`PacketSocket.receive`"""
        return self._packets.receive()

    def send(self, frame: bytes) -> bool:
        """`PacketSocket.send`"""
        return self._packets.send(frame)
