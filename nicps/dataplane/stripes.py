# SPDX-License-Identifier: Apache-2.0
"""The maps of the XDP program's room for stripes (docs/stripes.md), and the values read from them.

A bank is that of a round: its parity. A fragment's tag is view << 32 | round. Rounds are of a channel
(docs/channels.md), 0 where none is named; fragments count from the channel's first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nicps.barrier import barrier
from nicps.dataplane import bpf, inner
from nicps.dataplane.areas import Areas
from nicps.dataplane.inner import Records, Wanted
from nicps.layout import layout
from nicps.wire import MAX_MEMBERS

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StripesRoom:
    """Own lanes and sums, all zero, which the program does not use yet.

    Attributes: `rooms`, fragments of a bank, by channel.
    """

    rooms: tuple[int, ...]
    own_fd: int
    sums_fd: int

    def close(self) -> None:
        """Free them, unused."""
        _close(self.own_fd, self.sums_fd)


@dataclass(frozen=True, slots=True)
class StripesPlaces:
    """Places for an own stripe, all zero, which the program does not use yet.

    Attributes: `blocks`, blocks of a bank, by channel.
    """

    blocks: tuple[int, ...]
    gathers_fd: int
    blocks_fd: int

    def close(self) -> None:
        """Free them, unused."""
        _close(self.gathers_fd, self.blocks_fd)


class Stripes:
    """Own lanes, sums, and the places of the own stripe: two banks of each.

    Args:
        fds: the loaded maps' descriptors by name; the caller keeps them open as long as this lives.
        config, members, progress: views of these maps; `progress` by bank, and in it by sender and channel.
        swapping: held while the program gets other maps, by `Servers` too: some are of both.

    Attributes: `areas`, each channel's part of a bank. `room`, fragments of a bank of `own` and of `sums`; `places`,
    blocks of a bank of the own stripe, which has `BLOCK_SLOTS` places for each; both are of all channels, and 0 as long
    as there are none. `own_fd`, `sums_fd`, `blocks_fd`,
    descriptors for the training program, -1 before there is one: it may write to the first only. `own` (2, room),
    `struct nicps_own`; `sums` (2, room), read-only, `struct nicps_stored`; `gathers` (2, 8 * places), read-only,
    `struct nicps_gather`.
    """

    def __init__(
        self,
        fds: Mapping[str, int],
        config: Records,
        members: Records,
        progress: Records,
        swapping: threading.Lock,
    ) -> None:
        self._fds, self._config, self._members, self._progress = fds, config, members, progress
        shapes, limits = layout().records, layout().limits
        self._banks, self._each = limits["BANKS"], limits["BLOCK_SLOTS"]
        self.areas = Areas(fds, config)
        self._swapping = swapping
        self.own_fd = self.sums_fd = self.blocks_fd = self._gathers_fd = -1
        self.room = self.places = 0
        self.own: Records = np.zeros((self._banks, 0), shapes["own"])
        self.sums: Records = np.zeros((self._banks, 0), shapes["stored"])
        self.gathers: Records = np.zeros((self._banks, 0), shapes["gather"])
        entries = bpf.map_info(fds["sent"]).entries
        sent = np.frombuffer(bpf.map_memory(fds["sent"]), shapes["sent"], entries)
        self._sent: Records = sent.reshape(self.areas.most, self._banks, -1)

    # ---- the maps

    def reserve(self, *rooms: int) -> StripesRoom:
        """New own lanes and sums for `use`: that takes long, and may be done in another thread.

        Args:
            rooms: fragments of a vector, by channel.

        Raises:
            EnvironmentProblem: there is not enough memory.
        """
        entries = self._banks * sum(rooms)
        wanted = (
            Wanted("nicps_own", "own_shape", entries),
            Wanted("nicps_stored", "sums_shape", entries, frozen=True),
        )
        return StripesRoom(rooms, *inner.make(self._fds, wanted, "own lanes and sums"))

    def reserve_places(self, *blocks: int) -> StripesPlaces:
        """New places of an own stripe for `use`; may be done in another thread.

        Args:
            blocks: by channel, where 0 stands for 1.

        Raises:
            EnvironmentProblem: there is not enough memory.
        """
        by_channel = tuple(max(each, 1) for each in blocks)
        entries = self._banks * sum(by_channel)
        wanted = (
            Wanted("nicps_gathers", "gathers_shape", entries * self._each),
            Wanted("nicps_gathered", "blocks_shape", entries, frozen=True),
        )
        return StripesPlaces(by_channel, *inner.make(self._fds, wanted, "places for an own stripe"))

    def use(self, *reserved: StripesRoom | StripesPlaces) -> None:
        """From now on the program takes lanes from this room, and puts sums into it; contributions to the own stripe go
        to these places. All are empty.

        With another room there are no places until others come into use. A process that has mapped the old maps keeps
        them. Takes no frames while it works (20 to 60 ms).
        """
        with self._swapping:
            inner.swap(self._config, *map(self.swap, reserved))

    def swap(self, reserved: StripesRoom | StripesPlaces) -> Iterator[list[inner.Place]]:
        """The steps of `use`, for `inner.swap`; a room comes before its places."""
        if isinstance(reserved, StripesRoom):
            return self._swap_room(reserved)
        return self._swap_places(reserved)

    def _swap_room(self, reserved: StripesRoom) -> Iterator[list[inner.Place]]:
        shapes = layout().records
        yield [(self._fds["own"], reserved.own_fd)]
        self._forget_counts()
        self.areas.set_rooms(reserved.rooms)
        yield [(self._fds["sums"], reserved.sums_fd)]
        self.forget_sent()
        _close(self.own_fd, self.sums_fd)
        self.own_fd, self.sums_fd = reserved.own_fd, reserved.sums_fd
        self.room = sum(reserved.rooms)
        self.own = inner.view(self.own_fd, shapes["own"], self._banks)
        self.sums = inner.view(self.sums_fd, shapes["stored"], self._banks, writable=False)
        self._forget_places()

    def _swap_places(self, reserved: StripesPlaces) -> Iterator[list[inner.Place]]:
        yield [(self._fds["gathers"], reserved.gathers_fd)]
        self.areas.set_blocks(reserved.blocks)
        yield [(self._fds["gather_blocks"], reserved.blocks_fd)]
        _close(self._gathers_fd, self.blocks_fd)
        self._gathers_fd, self.blocks_fd = reserved.gathers_fd, reserved.blocks_fd
        self.places = sum(reserved.blocks)
        gather = layout().records["gather"]
        self.gathers = inner.view(self._gathers_fd, gather, self._banks, writable=False)

    def retire_places(self) -> None:
        """Let the program take no contributions to the own stripe until other places are in use.

        To be called while `config["enabled"]` is 0 and no frame is in the program, as after `Maps.enter_view`.
        Processes that have the places mapped keep their content: a round of the view before may still be committed.
        """
        self.areas.set_blocks(())
        self._forget_places()

    def retire(self) -> None:
        """The job is over: the program takes no more frames of stripes into these maps, and `release` frees them."""
        self.areas.set_rooms((0,))
        shapes = layout().records
        self.own = np.zeros((self._banks, 0), shapes["own"])
        self.sums = np.zeros((self._banks, 0), shapes["stored"])
        self.room = 0
        self._forget_places()

    def release(self) -> None:
        """Give the memory of retired maps back to the kernel, unless other maps are in use since.

        Takes up to 0.1 s, and may be done in another thread. A process that has mapped the maps keeps them.
        """
        with self._swapping:
            used = self._config["room"][0] or self._config["gather_blocks"][0]  # by servers, too
            if used or self.own_fd < 0:
                return
            for name in ("own", "sums", "gathers", "gather_blocks"):
                inner.take_out(self._fds[name])
            self.close()

    def _forget_counts(self) -> None:
        """Of sums: the rows of senders, after that of channel 0, are of fragments that are broadcast."""
        for rows in (slice(0, 1), slice(layout().limits["SENDERS"], None)):
            self._progress[:, rows] = np.zeros((), self._progress.dtype)

    def _forget_places(self) -> None:
        self.places = 0
        self.gathers = np.zeros((self._banks, 0), layout().records["gather"])

    def forget_own(self) -> None:
        """Mark no lanes as converted: another training program will write them."""
        self.own["conversion"] = 0
        self.forget_sent()

    def close(self) -> None:
        """Close the maps; views of them stay readable."""
        _close(self.own_fd, self.sums_fd, self._gathers_fd, self.blocks_fd)
        self.own_fd = self.sums_fd = self._gathers_fd = self.blocks_fd = -1

    # ---- values of a view and a phase

    def set_ranks(self, open_: Sequence[int], later: Sequence[int]) -> None:
        """Set the aggregators of the view that was entered; this host may be one of them.

        Within a view an order may come and go at any time. Another order of the same view needs `config["enabled"]` to
        be 0, and then `Maps.quiesce`.

        Args:
            open_: the aggregators' numbers, in the order of their ranks, in the open round; empty if it is not striped.
                (0,) is a Linux switch that adds: the only aggregator then, and no member.
            later: the same for later rounds.
        """
        table = np.zeros((len(self._members), 2), np.uint8)
        for column, numbers in enumerate((open_, later)):
            table[list(numbers), column] = np.arange(1, len(numbers) + 1)
        counts = {"aggregators": len(open_), "aggregators_next": len(later)}
        # No frame may be taken with the rank of one order and the number of the other.
        for name, count in counts.items():
            if self._config[name] != count:
                self._config[name] = 0
        barrier()
        self._members["rank"] = table
        own = table[int(self._config["number"][0])]
        self._config["rank"], self._config["rank_next"] = own
        barrier()
        for name, count in counts.items():
            self._config[name] = count

    def set_rest(self, round_: int, view: int, behind: int) -> None:
        """Set the remainders that the program's own contributions to a Linux switch name (docs/linux-switch.md).

        To be called before the round's first fragment is sent.

        Args:
            round_: the round of the contributions.
            view: the view in which the round was committed whose remainders belong to this one.
            behind: how many rounds before this one that round is, at most 255; 0: no remainder belongs to it.
        """
        if not 0 <= behind <= 255:
            raise ValueError(f"remainders of {behind} rounds before cannot be named")
        bank = round_ % self._banks
        self._config["rest_view"][0, bank] = view if behind else 0
        self._config["rest_behind"][0, bank] = behind

    # ---- fragments that were sent

    def forget_sent(self) -> None:
        """Mark nothing as sent: another view has other stripes, another program other lanes."""
        self._sent[...] = np.zeros((), self._sent.dtype)

    def next_to_send(self, round_: int, aggregator: int, channel: int = 0) -> int:
        """The next fragment of that aggregator's stripe to send; 0: nothing has been sent to it in that round."""
        next_ = int(self._sent["next"][channel, round_ % self._banks, aggregator])
        of, index = divmod(next_, 1 << 32)
        return index if of == round_ else 0

    def set_sent(self, round_: int, aggregator: int, index: int, channel: int = 0) -> None:
        """The agent sends the fragments before `index` of that stripe. The program sends those that follow.

        The program raises the same word as sums come. If it does so at this moment, some fragments are sent twice. None
        is left out, because the side that raises the word sends the fragments that it has passed.
        """
        word = self._sent[channel, round_ % self._banks]
        of, sent = divmod(int(word["next"][aggregator]), 1 << 32)
        if of != round_:
            word["swallow"][aggregator] = 0
        elif sent >= index:
            return
        word["next"][aggregator] = round_ << 32 | index

    def swallow(self, round_: int, aggregator: int, sums: int, channel: int = 0) -> None:
        """Make the window of that stripe smaller: so many of the round's sums of it send no contribution; 0: every one
        does again. Nothing changes where nothing has been sent to it in that round.
        """
        if self.next_to_send(round_, aggregator, channel):
            self._sent["swallow"][channel, round_ % self._banks, aggregator] = sums

    def swallows(self, round_: int, aggregator: int, channel: int = 0) -> int:
        """How many sums of that stripe still send no contribution."""
        return int(self._sent["swallow"][channel, round_ % self._banks, aggregator])

    # ---- sums that have come

    def reached(
        self, round_: int, view: int, first: int, end: int, channel: int = 0
    ) -> tuple[int, int]:
        """How far the sums `first` to `end` (exclusive) have come.

        Returns the index of the first that is not here (`end` if all are), and one past the last that is (`first` if
        none is).
        """
        return inner.find_reach(self._sums_here(round_, view, first, end, channel), first)

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int, channel: int = 0
    ) -> list[tuple[int, int]]:
        """At most `limit` ranges (index, count) of the sums `first` to `end` (exclusive) that are not here."""
        return inner.find_gaps(self._sums_here(round_, view, first, end, channel), first, limit)

    def converted(
        self, round_: int, conversion: int, first: int, end: int, channel: int = 0
    ) -> int:
        """The number of consecutive records of `own`, from `first` to at most `end`, of that conversion (above 0).

        None count as long as the own stripe has no places: this host must not enter a list before it has them. If a
        switch adds, no host has a stripe of its own.
        """
        if not self.places and not self._switch_adds(round_):
            return 0
        mine = self.areas[channel].fragments(first, end)
        found = self.own["conversion"][round_ % self._banks, mine] == conversion
        barrier()  # the lanes are written before their conversion
        return int(np.argmin(np.append(found, False))) if conversion else 0

    def _switch_adds(self, round_: int) -> bool:
        later = round_ > self._config["round"][0]
        return bool(self._members["rank"][0, int(later)])

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int, channel: int = 0
    ) -> dict[int, int]:
        """The number of contributions that this host's own stripe lacks of each member on the list, this host excepted.

        A host's own lanes are added with the sum.

        Args:
            first, count: the stripe.
            members: the list, bit number - 1.

        Returns them by number, also if none is lacking.
        """
        mine = self.areas[channel].places(count, self._each)
        places = self.gathers[round_ % self._banks, mine]
        tagged = places["tag"] == _tag(view, round_)
        barrier()  # the first seen-bit is written before the tag
        seen = np.where(tagged, places["seen"], np.uint64(0)).astype("<u8")
        bits = np.unpackbits(seen.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        lacking = (count - bits.sum(0, dtype=np.int64)).tolist()
        listed = {k for k in range(1, MAX_MEMBERS + 1) if members >> k - 1 & 1}
        listed.discard(int(self._config["number"][0]))
        return {number: lacking[number - 1] for number in sorted(listed)}

    def _sums_here(self, round_: int, view: int, first: int, end: int, channel: int) -> Flags:
        """Whether each of these sums is here; sums without room are not."""
        mine = self.areas[channel].fragments(first, end)
        tags = self.sums["tag"][round_ % self._banks, mine]
        here = np.zeros(end - first, np.bool_)
        here[: len(tags)] = tags == _tag(view, round_)
        barrier()  # lanes, exponent and rest are written before the tag
        return here


def _tag(view: int, round_: int) -> np.uint64:
    return np.uint64(view << 32 | round_)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
