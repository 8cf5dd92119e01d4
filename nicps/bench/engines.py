# SPDX-License-Identifier: Apache-2.0
"""The engines of `nicps bench allreduce`: our exchanges and Gloo, each with a lab of its own.

An engine is told what to run; its `start` returns a `Running`, whose processes wait for each round at a barrier.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nicps import wire
from nicps.bench.barrier import BarrierServer, peak_rss_bytes
from nicps.collective.rounds import is_small
from nicps.dataplane.switch import SwitchPlane
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.lab import Lab, LabSettings, adding
from nicps.lab.adding import Keys
from nicps.lab.agents import joined
from nicps.session.commands import await_result, raise_failure

_SILENCE_S = 2.0
#: Ethernet, IPv4, and TCP with timestamps; what is left of the MTU is payload.
_TCP_BYTES = wire.ETHERNET_BYTES + 20 + 32
#: Of a host's processes, with tiny vectors.
_PROCESS_BYTES = 200_000_000
#: A switch that adds is told of this much memory, or more.
_LEAST_SWITCH_BYTES = 64 << 20


#: Bytes of memory of one host for a value, in its processes and in the kernel: a constant part, a part for each byte of
#: a lane, and a part for a value of the own stripe (docs/architecture.md, "Memory of a host"). If a switch adds, no
#: host has an own stripe: the switch has all of them, twice.
_HELD = {
    "broadcast": (32.4, 2.0, 0.0),
    "stripes": (12.2, 4.06, 16.5),
    "linux-switch": (12.2, 4.06, 0.0),
}
#: The name of calls of a group among the exchanges.
CALL = "call"
_HELD_GLOO = {"float32": 13.0, "float16": 35.0}


@dataclass(frozen=True, slots=True)
class Size:
    """The number of hosts, the number of values of their float32 vectors, the rate of the ports (bits per second; None:
    unshaped), and the room in a queue of the switch.
    """

    hosts: int
    params: int
    rate_bps: int | None
    queue_bytes: int = LabSettings.queue_bytes

    def shape(self, lab_name: str, switch: str = "bridge") -> LabSettings:
        """A lab for this setting.

        Raises:
            UsageProblem: there is no such lab.
        """
        return LabSettings(
            lab_name, self.hosts, self.rate_bps, switch=switch, queue_bytes=self.queue_bytes
        )


@dataclass(frozen=True)
class Running:
    """An engine's processes. `agents` and `programs`: their pids; `end` waits for them and returns the bytes of memory
    of the largest agent, or rank. `switch`: the pids of a switch that adds."""

    server: BarrierServer
    check: Callable[[], None]
    pids: Callable[[], tuple[list[int], list[int]]]
    end: Callable[[], int]
    switch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Engine(ABC):
    """One engine, with the settings of its processes.

    Attributes: `name`, `exchange` and `lane`, for users.
    """

    name: str
    exchange: str
    lane: str
    size: Size

    @property
    def switch(self) -> str:
        """Of its lab (`LabSettings.switch`)."""
        return "bridge"

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bytes of a value on the wire."""

    @property
    @abstractmethod
    def copies(self) -> float:
        """The number of vectors that go through the busiest port in one direction, or keep it waiting."""

    @property
    @abstractmethod
    def frame_share(self) -> float:
        """Bytes on the line of a byte of payload: as the queueing discipline of the lab's ports counts them, Ethernet
        headers included, preamble and gap not."""

    @property
    @abstractmethod
    def worst_error(self) -> float:
        """The largest difference to the exact sum that rounding explains."""

    @property
    @abstractmethod
    def held(self) -> float:
        """Bytes of memory that a host needs for a value."""

    @property
    def bytes(self) -> float:
        """Payload of a round, through the busiest port in one direction."""
        return self.copies * self.size.params * self.bits / 8

    @property
    def memory(self) -> float:
        """Bytes that all hosts' vectors need."""
        return self.size.hosts * self.size.params * self.held

    @property
    def all_memory(self) -> float:
        """The same with the memory of their processes."""
        return self.memory + self.size.hosts * _PROCESS_BYTES

    @contextlib.contextmanager
    def start(self, folder: Path, lab_name: str, rounds: int) -> Iterator[Running]:
        """Start its processes, in a new lab, for so many rounds.

        Args:
            folder: for this engine's files only.
        """
        folder.mkdir()
        folder.chmod(0o755)
        shape = self.size.shape(lab_name, self.switch)
        with Lab(shape) as lab, contextlib.ExitStack() as stack:
            server = BarrierServer(folder / "barrier.sock", self.size.hosts)
            stack.callback(server.close)
            yield self._begin(lab, folder, server, rounds, stack)

    @abstractmethod
    def _begin(
        self,
        lab: Lab,
        folder: Path,
        server: BarrierServer,
        rounds: int,
        stack: contextlib.ExitStack,
    ) -> Running:
        """Start them; processes that must end are put onto the stack."""


@dataclass(frozen=True)
class Nicps(Engine):
    """Our engine. `asked`: the job's setting `exchange`; `keyed`: its network has a key; `channels`: a step has a round
    on each of so many; 0: steps of one round.
    """

    asked: str
    keyed: bool
    channels: int = 0

    @classmethod
    def of(
        cls, asked: str, lane: str, size: Size, *, keyed: bool = False, channels: int = 0
    ) -> Nicps:
        """An engine whose job's `exchange` is `asked`."""
        if asked == Exchange.SWITCH.name:  # the lab's switch adds
            exchange = Exchange.LINUX_SWITCH
        else:
            exchange = Plan.choose({"exchange": asked}, Exchange.BROADCAST)
        name = "with key" if keyed else "nicps"
        return cls(name, exchange.name, lane, size, asked, keyed, channels)

    @property
    def bits(self) -> int:
        return int(self.lane[1:])

    @property
    def switch(self) -> str:
        return "xdp" if self._central else super().switch

    @property
    def _absolute(self) -> bool:
        return Exchange.named(self.exchange).absolute

    @property
    def _central(self) -> bool:
        return Exchange.named(self.exchange).central

    @property
    def copies(self) -> float:
        n = self.size.hosts
        if self._central:
            return 1.0
        return 2 * (n - 1) / n if self._absolute else n

    @property
    def frame_share(self) -> float:
        ours = wire.CONTRIBUTION_HEADER_BYTES if self._absolute else wire.FRAGMENT_HEADER_BYTES
        return _share_of(ours)

    @property
    def worst_error(self) -> float:
        # A lane's step is at most 2**-(bits-2) of the largest value (about 6 here), residual included. Sums in stripes
        # are rounded once more, by half a step of theirs, and that error is added to the next round.
        steps = 2 if self._absolute else 1
        return steps * self.size.hosts * 6.0 * 2.0 ** (2 - self.bits) + 1e-5

    @property
    def held(self) -> float:
        always, lane, stripe = _HELD[self.exchange]
        return always + lane * self.bits / 8 + stripe / self.size.hosts

    @property
    def memory(self) -> float:
        return super().memory + (self._switch_memory if self._central else 0)

    @property
    def _switch_memory(self) -> int:
        """Bytes that a switch which adds needs for the vectors."""
        lanes = wire.lanes_per_fragment(self.bits)
        needed = SwitchPlane.memory(-(-self.size.params // lanes), self.bits)
        return max(needed, _LEAST_SWITCH_BYTES)

    def _begin(
        self,
        lab: Lab,
        folder: Path,
        server: BarrierServer,
        rounds: int,
        stack: contextlib.ExitStack,
    ) -> Running:
        # All hosts share a machine, which stands still while it allocates large vectors: no host has died.
        arguments = ["--silence", f"{_SILENCE_S:g}"]
        keys = Keys.make(folder) if self.keyed else None
        switch: tuple[int, ...] = ()
        if self._central:
            told = (*adding.key_arguments(keys), "--memory", str(self._switch_memory))
            log = folder / "switch.log"
            switch = (stack.enter_context(adding.serving(lab, *told, log=log)).pid,)
            arguments += adding.trusting(keys)
        elif keys is not None:
            arguments += ["--key", str(keys.network)]
        agents = stack.enter_context(joined(lab, lab.hosts, folder, *arguments))
        settings = {
            "params": self.size.params,
            "rounds": rounds,
            "barrier": str(server.path),
            "lane": self.lane,
            "batch": self.size.hosts,
            "quorum": 1.0,
            "exchange": self.asked,
            "feedback": False,
        }
        entry = "nicps.bench.reduce_job"
        if self.channels:
            entry, settings["priorities"] = "nicps.bench.planned_job", self.channels
        channel = agents[0].submit(folder, entry=entry, settings=settings)
        stack.callback(channel.close)

        def pids() -> tuple[list[int], list[int]]:
            ours = [agent.process.pid for agent in agents]
            found = [process.pid for host in lab.processes().values() for process in host]
            return ours, [pid for pid in found if pid not in (*ours, *switch)]

        def end() -> int:
            rss = max(peak_rss_bytes(agent.process.pid) for agent in agents)
            result, _ = await_result(channel)
            if not result["weights_identical"]:
                raise JobFailed("the hosts' sums differ")
            return rss

        return Running(server, lambda: raise_failure(channel), pids, end, switch)


@dataclass(frozen=True)
class Calls(Engine):
    """Calls of a group (`nicps.collective`): what a script has, where `Nicps` are rounds of a job."""

    keyed: bool

    @classmethod
    def of(cls, size: Size, *, keyed: bool = False) -> Calls:
        """An engine whose programs call `all_reduce`."""
        return cls("with key" if keyed else "nicps", CALL, "float32", size, keyed)

    @property
    def bits(self) -> int:
        return 32

    @property
    def copies(self) -> float:
        n = self.size.hosts
        return n - 1 if is_small(4 * self.size.params, n) else 2 * (n - 1) / n

    @property
    def frame_share(self) -> float:
        return _share_of(wire.CONTRIBUTION_HEADER_BYTES)

    @property
    def worst_error(self) -> float:
        return 1e-4

    @property
    def held(self) -> float:
        always, lane, stripe = _HELD["stripes"]
        return always + 4 * lane + stripe / self.size.hosts

    def _begin(
        self,
        lab: Lab,
        folder: Path,
        server: BarrierServer,
        rounds: int,
        stack: contextlib.ExitStack,
    ) -> Running:
        arguments = ["--silence", f"{_SILENCE_S:g}"]
        if self.keyed:
            arguments += ["--key", str(Keys.make(folder).network)]
        agents = stack.enter_context(joined(lab, lab.hosts, folder, *arguments))
        programs, check = _ranks(
            self.size, lab, server, rounds, stack, "nicps.bench.call_rank", "--rank"
        )

        def end() -> int:
            return max(peak_rss_bytes(agent.process.pid) for agent in agents)

        ours = [agent.process.pid for agent in agents]
        return Running(server, check, lambda: (ours, [each.pid for each in programs]), end)


@dataclass(frozen=True)
class Gloo(Engine):
    """torch.distributed, one rank a host."""

    @classmethod
    def of(cls, dtype: str, size: Size) -> Gloo:
        """An engine that sums float32 or float16."""
        return cls("gloo", "gloo", dtype, size)

    @property
    def bits(self) -> int:
        return int(self.lane.removeprefix("float"))

    @property
    def copies(self) -> float:
        return 2 * (self.size.hosts - 1) / self.size.hosts

    @property
    def frame_share(self) -> float:
        frame = wire.ETHERNET_BYTES + wire.LEAST_MTU
        return frame / (frame - _TCP_BYTES)

    @property
    def worst_error(self) -> float:
        # float16 has 11 bits: partial sums of up to 2 * hosts are rounded once a host.
        return 1e-4 if self.bits == 32 else max(0.05, self.size.hosts**2 * 2.0**-9)

    @property
    def held(self) -> float:
        return _HELD_GLOO[self.lane]

    def _begin(
        self,
        lab: Lab,
        folder: Path,
        server: BarrierServer,
        rounds: int,
        stack: contextlib.ExitStack,
    ) -> Running:
        more = ["--master", lab.hosts[0].ip, "--dtype", self.lane]
        ranks, check = _ranks(
            self.size, lab, server, rounds, stack, "nicps.bench.gloo_rank", *more, "--rank"
        )
        # Each sends its peak with its last message, and ends.
        return Running(server, check, lambda: ([], [process.pid for process in ranks]), lambda: 0)


def _share_of(header_bytes: int) -> float:
    """Bytes on the line of a byte of payload, in our frames with such a header."""
    return (wire.ETHERNET_BYTES + header_bytes + wire.PAYLOAD_BYTES) / wire.PAYLOAD_BYTES


def _ranks(
    size: Size,
    lab: Lab,
    server: BarrierServer,
    rounds: int,
    stack: contextlib.ExitStack,
    module: str,
    *arguments: str,
) -> tuple[list[subprocess.Popen[Any]], Callable[[], None]]:
    """Start one rank on each host, with its number as the last argument.

    Returns the processes, and a function that raises JobFailed if one of them has ended with an error.
    """
    ranks: list[subprocess.Popen[Any]] = []

    def stop() -> None:
        for process in ranks:
            process.terminate()
        for process in ranks:
            process.wait(30.0)

    stack.callback(stop)
    told = ["--hosts", str(size.hosts), "--params", str(size.params), "--rounds", str(rounds)]
    told += ["--barrier", str(server.path), *arguments]
    for rank, host in enumerate(lab.hosts):
        command = [sys.executable, "-m", module, *told, str(rank)]
        ranks.append(lab.run(host, command, stdin=subprocess.DEVNULL))

    def check() -> None:
        codes = [process.poll() for process in ranks]
        if any(codes):
            raise JobFailed(f"a rank of {module} ended: exit codes {codes}")

    return ranks, check
