# SPDX-License-Identifier: Apache-2.0
"""Direct calls of several members (docs/direct.md): the kernel's programs and the training program's code as they are,
and between them a network, a clock and views that a schedule drives.

One thread runs at a time: a program's, until it waits, or the schedule's.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps
from nicps.layout import layout
from nicps.session import direct
from nicps.session.direct import DirectCall, DirectChannel, DirectMemory
from tests.xdp.kernel import MACS, NETWORK

_TX, _REDIRECT = 3, 7
_EVERYBODY = b"\xff" * 6
_STEPS = 20_000
#: What a member makes of a call: the members in it and their numbers, or those of the round.
Made = tuple[str, frozenset[int], tuple[bytes, ...]]


class Killed(BaseException):
    """The member is lost."""


class Kernel:
    """A host's programs and maps."""

    def __init__(self) -> None:
        kinds: dict[str, loader.ProgramKind] = {"nicps_xdp": "xdp", "nicps_direct": "xdp"}
        self.loaded = loader.load("nicps.c", {**kinds, "nicps_confined": "sched_cls"})
        fds = self.loaded.maps
        place = layout().limits["ROOM_DIRECT"].to_bytes(4, "little")
        program = self.loaded.programs["nicps_direct"].to_bytes(4, "little")
        bpf.map_update(fds["nicps_rooms"], place, program)
        self.maps = Maps(fds)
        self.view = 0

    def enter(self, view: int, number: int, live: frozenset[int]) -> None:
        """Another view."""
        macs = [MACS[k - 1] if k in live else None for k in range(1, max(live) + 1)]
        self.maps.enter_view(view, number, macs, number)
        config = self.maps.config
        config["network"], config["enabled"], config["everybody"] = NETWORK, 1, 255
        self.maps.stripes.areas.words["direct"][0] = 1
        self.view = view

    def memory(self) -> DirectMemory:
        """As a program maps it."""
        fds = self.loaded.maps
        bells = [os.dup(fds[f"call_bell_{channel}"]) for channel in range(8)]
        nothing = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        return DirectMemory([os.dup(fds["desks"]), os.dup(fds["numbers"]), nothing, *bells])

    def run(self, program: str, frame: bytes) -> bpf.Run:
        """Of that frame."""
        return bpf.prog_test_run(self.loaded.programs[program], frame)


class Member:
    """A member's program. `made`: what has come of its calls."""

    def __init__(self, scene: Scene, number: int, kernel: Kernel, calls: int) -> None:
        self.scene, self.number, self.kernel, self.calls = scene, number, kernel, calls
        self.view, self.live = scene.views[0]
        self.made: list[Made] = []
        self.at_round, self.met = False, frozenset[int]()
        self.rounds = scene.first_round
        self.killed = self.done = False
        self.error: BaseException | None = None
        self.memory = memory = kernel.memory()
        memory.send = self._send  # type: ignore[method-assign]
        self.channel = DirectChannel(memory, 0, number)
        self.channel._bell.wait = lambda seconds: self.wait()  # type: ignore[method-assign]
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def go(self) -> None:
        """Let it run until it waits."""
        self.turn.release()
        self.back.acquire()

    def wait(self) -> None:
        """In its thread: the schedule goes on."""
        self.back.release()
        self.turn.acquire()
        if self.killed:
            raise Killed

    def _send(self, frame: bytes) -> bool:
        run = self.kernel.run("nicps_confined", frame)
        if run.verdict == _REDIRECT:
            self.scene.send(self.number, run.frame)
        return True

    def _look(self) -> tuple[int, frozenset[int]]:
        if self.killed:
            raise Killed
        return self.view, self.live

    def _run(self) -> None:
        self.turn.acquire()
        try:
            since = 0
            while len(self.made) < self.calls:
                index = len(self.made)
                data = bytes([self.number, index]) * (1 if index % 3 else 900)
                call = DirectCall(self.view, self.rounds, since, index, self.live)
                found = self.channel.gather(call, data, self._look)
                if found is not None:
                    members = frozenset(found)
                    told = tuple(given for _, given in sorted((k, found[k][1]) for k in found))
                    assert {found[k][0] for k in found} == {index}
                    self.made.append(("direct", members, told))
                    since += 1
                    continue
                self.at_round = True
                while self.at_round:
                    self.wait()
                self.made.append(("round", self.met, ()))
                self.rounds, since = self.rounds + 1, 0
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.memory.close()
        self.back.release()


class Scene:
    """One schedule, drawn from a seed.

    Args:
        first_view, first_round: above all that the kernels have seen before.
    """

    def __init__(
        self, kernels: list[Kernel], seed: int, first_view: int, first_round: int, calls: int = 8
    ) -> None:
        self.random = random.Random(seed)
        size = self.random.randint(2, len(kernels))
        self.views = [(first_view, frozenset(range(1, size + 1)))]
        self.first_round = first_round
        self.flight: list[tuple[int, bytes]] = []
        self.clock = 0.0
        self.loss = self.random.choice([0.0, 0.05, 0.3])
        self.kills = self.random.randint(0, size - 1)
        for number, kernel in enumerate(kernels[:size], 1):
            kernel.enter(first_view, number, self.views[0][1])
        self.members = {
            number: Member(self, number, kernel, calls)
            for number, kernel in enumerate(kernels[:size], 1)
        }

    def send(self, by: int, frame: bytes) -> None:
        """To all others, or to the one that it is for."""
        to = frame[:6]
        for number in self.members:
            if number != by and to in (_EVERYBODY, MACS[number - 1]):
                self.flight.append((number, frame))

    def run(self) -> dict[int, list[Made]]:
        """Until all that are left have made their calls; what they have made of them, with those that were lost."""
        before, direct.time = direct.time, self  # type: ignore[assignment]
        try:
            for _ in range(_STEPS):
                if all(member.done for member in self.members.values()):
                    break
                self._step()
            else:
                raise AssertionError(
                    {
                        k: (len(m.made), m.at_round, m.view, m.killed, m.done)
                        for k, m in self.members.items()
                    }
                )
        finally:
            direct.time = before
        for member in self.members.values():
            if member.error is not None:
                raise member.error
        return {number: member.made for number, member in self.members.items()}

    def monotonic(self) -> float:
        """In place of the module `time`."""
        return self.clock

    def _step(self) -> None:
        drawn = self.random
        steps: list[Callable[[], Any]] = []
        if self.flight:
            steps += [self._deliver] * 6
        waiting = [m for m in self.members.values() if not (m.done or m.at_round)]
        if waiting:
            steps += [lambda: self._wake(drawn.choice(waiting))] * 3
        behind = [m for m in self._left if (m.kernel.view, m.view) != (self.views[-1][0],) * 2]
        if behind:
            steps.append(lambda: self._enter(drawn.choice(behind)))
        if self.kills and drawn.random() < 0.02:
            steps = [self._kill]
        if self._meets():
            steps = [self._meet]
        drawn.choice(steps)()

    @property
    def _left(self) -> list[Member]:
        return [member for member in self.members.values() if not member.killed]

    def _deliver(self) -> None:
        to, frame = self.flight.pop(self.random.randrange(len(self.flight)))
        if self.random.random() < self.loss or self.members[to].killed:
            return
        if self.random.random() < 0.1:
            self.flight.append((to, frame))
        run = self.members[to].kernel.run("nicps_xdp", frame)
        if run.verdict == _TX:
            self.send(to, run.frame)

    def _wake(self, member: Member) -> None:
        self.clock += self.random.choice([0.0, 0.001, 0.01, 0.03])
        member.go()

    def _enter(self, member: Member) -> None:
        view, live = self.views[-1]
        if member.kernel.view != view:
            member.kernel.enter(view, member.number, live)
        else:
            member.view, member.live = view, live

    def _kill(self) -> None:
        self.kills -= 1
        member = self.random.choice(self._left)
        member.killed = True
        view, live = self.views[-1]
        self.views.append((view + 1, live - {member.number}))
        while not member.done:
            member.go()

    def _meets(self) -> bool:
        """All that are left are at a round, in the newest view; perhaps some have made all calls already."""
        newest = self.views[-1][0]
        left = self._left
        return bool(left) and all(m.at_round and m.view == m.kernel.view == newest for m in left)

    def _meet(self) -> None:
        left = self._left
        assert len({len(member.made) for member in left}) == 1, "they are at different calls"
        for member in left:
            member.at_round, member.met = False, self.views[-1][1]


def agree(made: dict[int, list[Made]], lost: set[int]) -> None:
    """What all that are left have made of each call is the same, and of what one that was lost has completed, too."""
    left = [of for number, of in made.items() if number not in lost]
    for index in range(max((len(of) for of in made.values()), default=0)):
        here = {of[index] for of in left if index < len(of)}
        assert len(here) <= 1, (index, here)
        if not here:
            continue
        for number in lost:
            if index < len(made[number]) and made[number][index][0] == "direct":
                assert here == {made[number][index]}, (index, number)
