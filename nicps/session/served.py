# SPDX-License-Identifier: Apache-2.0
"""The training program's memory where servers hold the parameters (docs/servers.md): its own steps, and what it pulls.

    served.step(round_, weights, samples)    # weights - pulled + residual
    match served.wait(round_):               # Stepped, Commit, or None: the phase is over
        ...
    served.pull(round_)
    if served.wait_pulled(round_):
        served.read(weights)

Own lanes are written here. The store is written by the kernel's programs alone, and read in place. Both have one bank.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from nicps.barrier import barrier
from nicps.session.absolute import AbsoluteSummer, StepQuantiser
from nicps.session.fields import Message
from nicps.session.lanes import F32, LaneFormat
from nicps.session.maps import mapped
from nicps.session.phases import Commit
from nicps.session.residual_file import ResidualFile
from nicps.session.served_form import PULLED_WIDTH, Pull, Pulled, Serves, Step, Stepped
from nicps.session.shared_form import Committed, Prepared, Read
from nicps.session.stripes import Records

#: How often a waiting program looks whether more parameters are here.
_GLANCE_S = 0.001
#: Phases before which what was committed is read.
_AFTER_READING = ("test", "end")

OfRound: TypeAlias = Committed | Stepped | Pulled
R = TypeVar("R", bound=OfRound)


class Wait(Protocol):
    """Waits for a message of a round, as `nicps.client.Session` does."""

    def __call__(self, round_: int, /, *kinds: type[R], through: tuple[str, ...] = ()) -> R | None:
        """None if another phase comes before, but for those in `through`."""


class Served:
    """What one training program shares with its agent and the kernel, in the phases of training with servers.

    Args:
        format: of the vector, as steps are sent.
        residual: what rounding steps has left over.
        number: this member's.
        say: tells the agent something.
        wait: waits for what it says.
        glance: waits so long for it, and keeps it; False once there is something that comes before the rest of a pull.

    Attributes: `about`, what the phase fixes.
    """

    def __init__(
        self,
        format: LaneFormat,
        residual: ResidualFile,
        number: int,
        say: Callable[[Message], None],
        wait: Wait,
        glance: Callable[[float], bool],
    ) -> None:
        self._format, self._file, self._number = format, residual, number
        self._say, self._wait, self._glance = say, wait, glance
        self._pulled = LaneFormat(format.lanes, PULLED_WIDTH)
        self._quantiser = StepQuantiser(format, residual.residual)
        self._summer = AbsoluteSummer(self._pulled)
        self._values = np.empty(self._pulled.batch * self._pulled.per_fragment, np.float32)
        self.about = Serves((), 0)
        self._own: Records | None = None
        self._store: Records | None = None
        self._filled: F32 | None = None  # a memory file for the weights of the own part
        self._phase = 0  # its number
        self._part: tuple[int, F32] = (
            0,
            np.zeros(0, np.float32),
        )  # the own one, where this host has no steps
        self._committed: F32 | None = None  # the parameters of the last commit
        self._converted = 0  # the round to which a step was given that is not judged yet
        self._before = 0  # no number up to that is the pull's under way
        self._stepped = 0  # the step that was added last, whose answers may have brought parameters
        self._reads = False  # what was committed is not read yet

    # ---- a phase

    def map(self, message: Serves | Pulled, fds: Iterator[int]) -> None:
        """Map what comes with a message; descriptors are closed."""
        if isinstance(message, Pulled):
            if message.lanes:
                file = mapped(next(fds), 4 * message.lanes, mmap.PROT_READ)
                self._part = message.first, np.frombuffer(file, np.float32, message.lanes)
            return
        self.about, self._converted = message, 0
        if message.room:
            both = mmap.PROT_READ | mmap.PROT_WRITE
            whole = LaneFormat(message.room * self._pulled.per_fragment, PULLED_WIDTH)
            self._own = Records("own", self._format, next(fds), message.pushes, both, banks=1)
            self._store = Records("stored", whole, next(fds), message.room, mmap.PROT_READ, banks=1)
        if message.lanes:
            file = mapped(next(fds), 4 * message.lanes)
            self._filled = np.frombuffer(file, np.float32, message.lanes)

    def waits_to_fill(self, phase: int) -> bool:
        """Whether this member is prepared for that phase only once it has called `fill`."""
        self._phase = phase
        return self._filled is not None

    def fill(self, weights: F32) -> None:
        """Where this host is a server whose part is filled from its own program: give it these weights.

        Args:
            weights: float32 (lanes,).
        """
        if self._filled is None:
            return
        first = self.about.first
        np.copyto(self._filled, weights[first : first + len(self._filled)])
        self._filled = None
        self._say(Prepared(self._phase))

    # ---- a step

    def step(self, round_: int, weights: F32, samples: int) -> None:
        """Give what `weights` differ in from what was pulled, with the residual, to the servers; `wait` follows.

        Args:
            weights: float32 (lanes,), not changed.

        Raises:
            NonFinite, TooLarge: a number of the step cannot be sent; nothing was.
        """
        own, format, quantiser = self._records(self._own), self._format, self._quantiser
        quantiser.begin()
        each = format.per_fragment // self._pulled.per_fragment
        for first in range(0, format.fragments, format.batch):
            count = min(format.batch, format.fragments - first)
            self._read(first * each, (first + count) * each, self._values)
            quantiser.step(weights, self._values, first, count, own.lanes[0], own.exponents[0])
        barrier()  # lanes are written before the agent hears of them
        self._converted = round_
        self._say(Step(round_, samples))

    def skip(self, round_: int) -> None:
        """Wait for the end of the round, which has had enough steps."""
        self._say(Step(round_, 1, skip=True))

    def wait(self, round_: int) -> Stepped | Commit | None:
        """Wait until the step is with all servers, or the round is committed; None if the phase ended before.

        Raises:
            JobAborted: the job was stopped.
        """
        kinds: tuple[type[Stepped | Committed], ...] = (Stepped, Committed)
        message = self._wait(round_, *kinds)
        offered, self._converted = self._converted == round_, 0
        self._stepped = 0  # of a step that is dropped, what came with its answers is pulled again
        if isinstance(message, Stepped):
            self._stepped = message.number
            if offered:
                self._keep_residual()
            return message
        if message is None:
            return None
        if offered and self._number in message.counted:
            self._keep_residual()
        self._reads = True
        return Commit.of(message, offered=offered)

    def _keep_residual(self) -> None:
        """The step converted last counts: what rounding has left over goes into the next one."""
        self._file.residual.keep()
        self._file.state = ""  # it belongs to no state before the next commit

    # ---- parameters

    def pull(self, round_: int) -> None:
        """Ask for all parameters; `wait_pulled` follows. Meanwhile `here` says which fragments have come.

        Answers to a step with lanes of 32 bits bring parameters: where all have come, no server is asked. Otherwise the
        kernel writes over those that have, so they are not here before they come again.
        """
        stepped, self._stepped = self._stepped, 0
        if self._store is not None:
            tags = self._store["tag"]
            brought = stepped > 0 and bool((tags == stepped).all())
            self._before = stepped - 1 if brought else max(stepped, int(tags.max()))
        self._say(Pull(round_))

    def wait_pulled(self, round_: int) -> bool:
        """Wait until all are here; False if another phase comes before, or no server can give them. After a commit a
        test waits.

        Raises:
            JobAborted: the job was stopped.
        """
        through = _AFTER_READING if self._reads else ()
        found = self._wait(round_, Pulled, through=through)
        if found is None or found.lost:
            return False
        self._reads = False
        return True

    def caught_up(self, round_: int) -> None:
        """What was pulled is of the last commit, which could not be pulled in its own phase: the others wait for that.

        Args:
            round_: the one before the open one.
        """
        self._say(Read(round_, ""))

    @property
    def fragments(self) -> int:
        """Fragments of parameters; each has 360."""
        return self._pulled.fragments

    def here(self, first: int, end: int) -> bool:
        """Whether the pull under way, or the last one, has brought fragments `first` to `end` (exclusive)."""
        tags = self._records(self._store)["tag"][0, first:end]
        return bool((tags > self._before).all())

    def arrive(self, first: int, end: int) -> bool:
        """Wait until these fragments of the pull are here; False if `wait_pulled` must be called first.

        The pull may have ended then, or the state must be saved meanwhile.
        """
        while not self.here(first, end):
            if not self._glance(_GLANCE_S):
                return self.here(first, end)
        return True

    def read(self, out: F32, first: int = 0, end: int | None = None) -> None:
        """Read parameters out of the store, those of fragments `first` to `end` (exclusive), at their places in `out`.

        Args:
            out: float32 (lanes,); what is outside of these fragments stays.
        """
        end = self.fragments if end is None else min(end, self.fragments)
        barrier()  # the kernel writes lanes, then the tag
        per, step = self._pulled.per_fragment, self._pulled.batch
        if self._store is not None:
            for at in range(first, end, step):
                self._read(at, min(at + step, end), out[at * per :])
        begin, part = self._part
        low, high = max(begin, first * per), min(begin + len(part), end * per)
        if low < high:
            out[low:high] = part[low - begin : high - begin]

    def version(self, first: int = 0, end: int | None = None) -> tuple[int, int]:
        """The round of the oldest of these fragments, and how many pushes of that round are in it at least."""
        end = self.fragments if end is None else end
        rest: npt.NDArray[np.uint64] = self._records(self._store)["rest"][0, first:end]
        round_, version = divmod(int(rest.min()), 1 << 32)
        return round_, version

    def keep_commit(self, weights: F32) -> None:
        """These are the parameters of a commit: `take_back` gives them again. A copy, unless each step is a commit."""
        if self.about.every == 1:
            self._committed = None
            return
        if self._committed is None:
            self._committed = np.empty_like(weights)
        np.copyto(self._committed, weights)

    def take_back(self, weights: F32) -> None:
        """The open round was left in the middle: the parameters of the last commit take the place of `weights`.

        Where each step is a commit they are in the store, which no push has changed.
        """
        if self._committed is None:
            self.read(weights)
        else:
            np.copyto(weights, self._committed)

    def _read(self, first: int, end: int, out: F32) -> None:
        """At most a batch of fragments; `out` begins with the first of them, and has them or the end of the vector."""
        store, end = self._records(self._store), min(end, self.fragments)
        inside = min(end * self._pulled.per_fragment, self._format.lanes)
        here = slice(first, end)
        lanes, exponents = store.lanes[0, here], store.exponents[0, here]
        room = out[: inside - first * self._pulled.per_fragment]
        self._summer.batch(lanes, exponents, 0, end - first, room)

    @staticmethod
    def _records(there: Records | None) -> Records:
        assert there is not None, "the agent has sent no own records and no store"
        return there
