# SPDX-License-Identifier: Apache-2.0
"""The XDP program's maps as NumPy views of memory that the kernel shares: no system call, no copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.barrier import barrier
from nicps.dataplane import bpf, inner
from nicps.dataplane.inner import Records, Wanted
from nicps.dataplane.servers import Servers
from nicps.dataplane.stripes import Flags, Stripes, StripesPlaces, StripesRoom
from nicps.layout import layout
from nicps.wire import BLOCK_LANES, MAX_MEMBERS, SWITCH

#: Of SipHash.
KEY_BYTES = 16
#: The part of a count that has the number (`struct nicps_progress`).
_DISTINCT = 0xFFFFFFFF
#: Tries to read memory that the kernel may be writing: writing takes a microsecond, unless its processor is taken away.
_READS = 100

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accumulators:
    """Two banks of `blocks` blocks, all zero, which the program does not use yet (`Maps.use`)."""

    blocks: int
    slots_fd: int
    sums_fd: int

    def close(self) -> None:
        """Free them, unused."""
        os.close(self.slots_fd)
        os.close(self.sums_fd)


class Maps:
    """Views of the maps, and the values read from them.

    Args:
        fds: the maps' descriptors by name; the caller keeps them open as long as this lives.

    Attributes: `stripes`, the maps of the exchange `stripes`; `servers`, for parameter servers, None before
    `add_servers`.
    """

    def __init__(self, fds: Mapping[str, int]) -> None:
        self._fds = fds
        shapes, limits = layout().records, layout().limits
        self._banks, self._senders = limits["BANKS"], limits["SENDERS"]
        self._slots_per_block = limits["BLOCK_SLOTS"]
        self._config = self._view("config", shapes["config"])
        self._ring = self._view("ring", shapes["ring"])
        self._saved = self._view("bounced_frame", shapes["saved"])
        self._members = self._view("members", shapes["member"])
        self._key = self._view("view_key", shapes["key"])
        self._outgoing = self._view("outgoing", shapes["outgoing"])
        self._windows = self._view("windows", shapes["window"]).reshape(-1, self._senders)
        self._token_windows = self._view("token_windows", shapes["token_window"])
        self._train = self._view("train", shapes["train"])
        self._counters = self._view("counters", np.dtype(np.uint64))
        progress = self._view("progress", shapes["progress"])
        self._progress = progress.reshape(self._banks, limits["COUNTS"])
        self._tags, self._counts = self._progress["tag"], self._progress["count"]
        self._swapping = threading.Lock()  # the maps that the program uses
        self.stripes = Stripes(fds, self._config, self._members, self._progress, self._swapping)
        self.servers: Servers | None = None
        self._slots_fd = -1
        self.accumulators_fd = -1
        self.blocks = 0
        self._slots: Records = np.zeros((self._banks, 0), shapes["slot"])
        self.accumulators: I64 = np.zeros((self._banks, 0, BLOCK_LANES), np.int64)

    def _view(self, name: str, dtype: np.dtype[Any]) -> Any:
        entries = bpf.map_info(self._fds[name]).entries
        return np.frombuffer(bpf.map_memory(self._fds[name]), dtype, entries)

    def add_servers(self, fds: Mapping[str, int]) -> None:
        """The program of servers is loaded, with these further maps; as `fds` of this class."""
        parts = self._config, self._ring, self._progress, self.quiesce, self._swapping
        self.servers = Servers({**self._fds, **fds}, *parts)

    @property
    def config(self) -> Any:
        """The program's settings, `struct nicps_config`: read and assign by name, as in `config["view"] = 3`."""
        return self._config[0]

    @property
    def ring(self) -> Any:
        """The program's record of the token, `struct nicps_ring`."""
        return self._ring[0]

    @property
    def train(self) -> Any:
        """The counts of the train that this host was asked to count, `struct nicps_train`."""
        return self._train[0]

    def expect(self, nonce: int) -> Any:
        """From now on frames of that train are counted, from zero if they were not before; its `train`."""
        if int(self.train["nonce"]) != nonce:
            self._train[0] = (nonce, 0, 0, 0, 0)
        return self.train

    @property
    def slots_fd(self) -> int:
        """Descriptor of the slots' map, for programs that read sums while they come in; -1 before `use`."""
        return self._slots_fd

    @property
    def sequence(self) -> int:
        """Frames signed in this view, on the way out that had more; at 2^32 no more are sent until the next view."""
        return int(max(self._outgoing[way][0] for way in ("sequence", "answers")))

    @property
    def sequence_of_switch(self) -> int:
        """The same for the frames of a Linux switch that were taken in this view. The switch numbers its sums by
        itself.
        """
        window = self._windows[0, 0]
        return int(max(window["highest"], window["answers"]))

    def set_key(self, key: bytes | None) -> None:
        """The view's key of 16 bytes, with numbers from 1 on again; None on a trusted LAN.

        A key serves once: numbers that start again under the same one would let old frames in.
        """
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a view's key has {KEY_BYTES} bytes, not {len(key)}")
        for windows in (self._windows, self._token_windows):
            windows[...] = np.zeros((), windows.dtype)
        self._outgoing[...] = np.zeros((), self._outgoing.dtype)
        self._key["word"] = np.frombuffer(key or bytes(KEY_BYTES), "<u8")
        self.config["keyed"] = int(key is not None)

    def enter_view(
        self,
        view: int,
        number: int,
        members: Sequence[bytes | None],
        successor: int,
        key: bytes | None = None,
    ) -> None:
        """From now on this host is a member of that view, and all state of an older one is cleared.

        Tokens and fragments are dropped until the caller has set the rounds and `config["enabled"]`. Takes 10 to
        30 ms (`quiesce`).

        Args:
            number: this host's.
            members: MAC addresses, of member 1 first; None for a number whose host is not in (R4, R19).
            successor: number of the member that this host hands the token.
            key: of the view, see `set_key`.
        """
        if len(members) > MAX_MEMBERS:
            raise ValueError(f"{len(members)} members are more than {MAX_MEMBERS}")
        config = self.config
        config["enabled"] = 0
        self.quiesce()  # a frame of the old view may still be in the program
        table = np.zeros((self._senders, 6), np.uint8)
        table[0] = np.frombuffer(SWITCH, np.uint8)
        for place, mac in enumerate(members, 1):
            table[place] = np.frombuffer(mac or bytes(6), np.uint8)
        self._members["mac"] = table
        config["view"], config["number"], config["next"] = view, number, successor
        config["members"] = len(members)
        live = [place for place, mac in enumerate(members) if mac is not None]
        config["live"], config["live_members"] = len(live), sum(1 << place for place in live)
        self.stripes.set_ranks((), ())
        self.stripes.forget_sent()
        self.stripes.areas.close_rounds()
        config["round_low"], config["round_high"], config["bounce"] = 1, 0, 0
        self.ring["seen"] = self.ring["bounced"] = config["position"] = 0
        self.set_key(key)

    def saw(self, generation: int, hop: int) -> None:
        """Take only tokens newer than this one from now on; called for every token that the agent sends.

        The position is a word that only the agent writes. Raising `ring["seen"]` from here, by a comparison and a
        store, could undo a store of the kernel between the two.
        """
        position = np.uint64(generation << 32 | hop)
        if position > self.config["position"]:
            self.config["position"] = position

    def quiesce(self) -> None:
        """Return when every run of the program that saw the former settings has ended (10 to 30 ms).

        Between `enabled = 0` and this, no frame of the old view can be added any more.
        """
        slots_fd = self._slots_fd if self._slots_fd >= 0 else self._fds["slots_shape"]
        inner.put(self._fds["slots"], slots_fd)

    def reserve(self, blocks: int) -> Accumulators:
        """New accumulators for `use`; for millions of lanes it takes long, and may be done in another thread.

        Raises:
            EnvironmentProblem: there is not enough memory.
        """
        entries = self._banks * blocks
        wanted = (
            Wanted("nicps_slots", "slots_shape", entries * self._slots_per_block),
            Wanted("nicps_sums", "blocks_shape", entries, frozen=True),
        )
        return Accumulators(blocks, *inner.make(self._fds, wanted, "accumulators"))

    def use(self, *reserved: Accumulators | StripesRoom | StripesPlaces) -> None:
        """From now on the program adds to these accumulators; counts and seen-bits start again. Memory of stripes:
        as `Stripes.use`.

        But where there are servers, counts stay: pushes may be under way, and the phase in which they are may go on.
        Those of the next phase with servers start again as it begins.

        Processes that have the old ones mapped keep them. Takes no fragments while it works (20 to 60 ms).
        """
        steps = [
            self._swap(each) if isinstance(each, Accumulators) else self.stripes.swap(each)
            for each in reserved
        ]
        with self._swapping:
            inner.swap(self._config, *steps)

    def _swap(self, reserved: Accumulators) -> Iterator[list[inner.Place]]:
        shapes, blocks = layout().records, reserved.blocks
        slots_fd, sums_fd = reserved.slots_fd, reserved.sums_fd
        yield [(self._fds["slots"], slots_fd)]
        if self.servers is None or not self.servers.in_use:
            self._progress[...] = np.zeros((), self._progress.dtype)
        self._config["blocks"] = blocks
        yield [(self._fds["accumulators"], sums_fd)]
        self._release()
        self._slots_fd, self.accumulators_fd, self.blocks = slots_fd, sums_fd, blocks
        self._slots = inner.view(slots_fd, shapes["slot"], self._banks)
        lanes = np.dtype((np.int64, BLOCK_LANES))
        sums = inner.view(sums_fd, lanes, self._banks, writable=False)
        self.accumulators = sums.reshape(self._banks, blocks, BLOCK_LANES)

    def allocate(self, blocks: int) -> None:
        """`reserve` and `use`."""
        self.use(self.reserve(blocks))

    def count(self, round_: int, view: int, sender: int, channel: int = 0) -> int:
        """Distinct fragments taken of a sender's contribution to a round; sender 0: of all, or the sums that came."""
        bank, tag = round_ % self._banks, view << 32 | round_
        if row := sender or (channel and self._senders - 1 + channel):
            here = int(self._tags[bank, row]) == tag
            barrier()  # a count is set back before its tag is written
            return int(self._counts[bank, row]) & _DISTINCT if here else 0
        taken = self._tags[bank, : self._senders] == np.uint64(tag)
        barrier()
        return int((self._counts[bank, : self._senders][taken] & np.uint64(_DISTINCT)).sum())

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` ranges (first, count) of a contribution's fragments that have not come."""
        if self.count(round_, view, sender) == fragments:
            return []
        return inner.find_gaps(self._taken(round_, view, sender, 0, fragments), 0, limit)

    def _taken(self, round_: int, view: int, sender: int, first: int, end: int) -> Flags:
        """Whether each of these fragments has come; sender 0: each of a switch's sums."""
        slots = self._slots[round_ % self._banks, first:end]
        bit = np.uint64(1 << max(sender - 1, 0))
        tagged = slots["tag"] == np.uint64(view << 32 | round_)
        barrier()  # the first seen-bits are written before the tag
        found: Flags = tagged & (slots["seen"] & bit != 0)
        return found

    def _switched(self, round_: int) -> bool:
        later = round_ > self.config["round"]
        return bool(self.config["sums_next" if later else "sums"])

    def reached(
        self, round_: int, view: int, first: int, end: int, channel: int = 0
    ) -> tuple[int, int]:
        """`Stripes.reached`, also of sums that a switch makes."""
        if self._switched(round_):
            return inner.find_reach(self._taken(round_, view, 0, first, end), first)
        return self.stripes.reached(round_, view, first, end, channel)

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int, channel: int = 0
    ) -> list[tuple[int, int]]:
        """`Stripes.missing_sums`, also of sums that a switch makes."""
        if self._switched(round_):
            return inner.find_gaps(self._taken(round_, view, 0, first, end), first, limit)
        return self.stripes.missing_sums(round_, view, first, end, limit, channel)

    def converted(
        self, round_: int, conversion: int, first: int, end: int, channel: int = 0
    ) -> int:
        """`Stripes.converted`"""
        return self.stripes.converted(round_, conversion, first, end, channel)

    def next_to_send(self, round_: int, aggregator: int, channel: int = 0) -> int:
        """`Stripes.next_to_send`"""
        return self.stripes.next_to_send(round_, aggregator, channel)

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int, channel: int = 0
    ) -> dict[int, int]:
        """`Stripes.absent`"""
        return self.stripes.absent(round_, view, first, count, members, channel)

    def of_channel(self, channel: int) -> ChannelMaps:
        """What has arrived of that channel's rounds."""
        return ChannelMaps(self, channel)

    # ---- of parameter servers, in phases with them

    @property
    def _served(self) -> Servers:
        assert self.servers is not None, "a phase with servers begins once there is room for it"
        return self.servers

    def acknowledged_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        """`Servers.acknowledged_to`"""
        return self._served.acknowledged_to(number, first, end)

    def missing_acknowledgements(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """`Servers.missing_acknowledgements`"""
        return self._served.missing_acknowledgements(number, first, end, limit)

    def pulled_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        """`Servers.pulled_to`"""
        return self._served.pulled_to(number, first, end)

    def missing_parameters(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """`Servers.missing_parameters`"""
        return self._served.missing_parameters(number, first, end, limit)

    def least_version(self, first: int, end: int) -> tuple[int, int]:
        """`Servers.least_version`"""
        return self._served.least_version(first, end)

    def answered(self, server: int) -> tuple[int, int, int, int]:
        """`Servers.answered`"""
        return self._served.answered(server)

    def made(self, round_: int, view: int) -> int:
        """`Servers.made`"""
        return self._served.made(round_, view)

    def counters(self) -> dict[str, int]:
        """Counts of our frames by outcome (`enum nicps_count`), since the program was loaded."""
        return dict(zip(layout().counters, self._counters.tolist(), strict=True))

    def bounced(self) -> bytes | None:
        """The token that the kernel forwarded last, from the version byte on (R16).

        None: there is none, or the kernel is writing it right now. Then ask again later.
        """
        saved = self._saved
        for _ in range(_READS):
            barrier()
            version = int(saved["version"][0])
            barrier()
            frame = saved["frame"][0, : int(saved["length"][0])].tobytes()
            barrier()
            if version % 2 == 0 and version == int(saved["version"][0]):
                return frame or None
        return None

    def _release(self) -> None:
        for fd in (self._slots_fd, self.accumulators_fd):
            if fd >= 0:
                os.close(fd)
        self._slots_fd = self.accumulators_fd = -1

    def close(self) -> None:
        """Close the maps that are as large as a job's vectors; views of them stay readable."""
        self._release()
        self.stripes.close()
        if self.servers is not None:
            self.servers.close()


class ChannelMaps:
    """What has arrived of the rounds of a channel above 0 (docs/channels.md): all of them are of stripes."""

    def __init__(self, maps: Maps, channel: int) -> None:
        self._maps, self._stripes, self._channel = maps, maps.stripes, channel

    def count(self, round_: int, view: int, sender: int) -> int:
        """`Maps.count`; nothing is broadcast in a channel above 0."""
        return 0 if sender else self._maps.count(round_, view, 0, self._channel)

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        """Nothing is broadcast in it."""
        return []

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        """`Stripes.reached`"""
        return self._stripes.reached(round_, view, first, end, self._channel)

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """`Stripes.missing_sums`"""
        return self._stripes.missing_sums(round_, view, first, end, limit, self._channel)

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        """`Stripes.converted`"""
        return self._stripes.converted(round_, conversion, first, end, self._channel)

    def next_to_send(self, round_: int, aggregator: int) -> int:
        """`Stripes.next_to_send`"""
        return self._stripes.next_to_send(round_, aggregator, self._channel)

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int
    ) -> dict[int, int]:
        """`Stripes.absent`"""
        return self._stripes.absent(round_, view, first, count, members, self._channel)
