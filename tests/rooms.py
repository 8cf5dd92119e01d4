# SPDX-License-Identifier: Apache-2.0
"""Rooms of an agent, without an interface: a real loop, real processes and files, and a life that is in no network."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nicps.agent.children import Children
from nicps.agent.commands import Commands
from nicps.agent.control import ControlSocket
from nicps.agent.direct import DirectRoom
from nicps.agent.driver import Driver
from nicps.agent.executor import Executor
from nicps.agent.flows import FlowWatch
from nicps.agent.group import Groups
from nicps.agent.loop import Loop
from nicps.agent.preparation import Preparation
from nicps.agent.probe import Prober
from nicps.agent.process import User
from nicps.agent.program import Program
from nicps.agent.records import TimeLine
from nicps.agent.scripts import Scripts
from nicps.agent.sender import Sender
from nicps.agent.served_room import ServedRoom
from nicps.agent.settings import AgentSettings
from nicps.agent.stores import Stores
from nicps.agent.waits import Waits
from nicps.dataplane.maps import Accumulators
from nicps.job import Life, LifeSettings
from nicps.job.slow_work import Task
from nicps.wire import BROADCAST

MAC = bytes([2, 0, 0, 0, 0, 1])
_LIMIT_S = 30.0


class NoKernel:
    """A data plane without one, and its maps: nothing comes, and what is sent is kept."""

    mode, iface, sequence = "native", "eth1", 0
    servers = None

    def __init__(self) -> None:
        self.maps = self.stripes = self.tx = self
        self.config = {"view": 1, "enabled": 0, "bounce": 0}
        self.sent: list[bytes] = []
        self.mac = MAC
        self.used: list[Accumulators] = []
        self.accumulators = np.zeros((2, 1440), np.int64)

    def count(self, round_: int, view: int, sender: int) -> int:
        return 0

    def missing(self, *_: int) -> list[tuple[int, int]]:
        return []

    def reserve(self, blocks: int) -> Accumulators:
        return Accumulators(blocks, -1, -1)

    def use(self, accumulators: Accumulators) -> None:
        self.used.append(accumulators)

    def forget_own(self) -> None:
        pass

    def retire(self) -> None:
        pass

    def release(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}

    def check_interface(self) -> None:
        pass

    def send(self, frame: bytes) -> bool:
        self.sent.append(frame)
        return True


class Rooms:
    """The life of a host that stands by, and what carries its actions out."""

    def __init__(self, folder: Path, network: str = "nicps") -> None:
        self.folder = folder
        self.failures: list[Exception] = []
        self.loop = Loop(self.failures.append)
        self.dataplane: Any = NoKernel()
        self.life = Life(MAC, LifeSettings("h1", network), self.dataplane, lambda: 1)
        self.driver = Driver(self.life)
        self.user = User("us", os.getuid(), pwd.getpwuid(os.getuid()).pw_gid)
        self.children = Children(
            self.user, self.loop, lambda: self.driver.now, lambda connection, uid: None
        )
        node = self.life.node
        self.sender = Sender(
            self.dataplane, node.header, node.take_sequence, lambda action, started: None
        )
        work, runs = folder / "work", folder / "runs"
        work.mkdir()
        self.settings = AgentSettings("eth1", work=work, runs=runs)
        self.executor = Executor(
            self.driver,
            self.loop,
            self.children,
            self.dataplane,
            self.sender,
            ServedRoom(self.dataplane),
            TimeLine(),
            Waits(node, FlowWatch(node, TimeLine()), 0.0),
            self.settings,
            self.user,
            lambda: folder / "prepared",
            lambda: None,
        )
        self.preparation = Preparation(self.driver, self.loop, self.children, work, runs, self.user)
        self.prober = Prober(self.life, self.dataplane, BROADCAST, lambda frame: None)
        self.program = Program(
            self.driver,
            self.loop,
            self.children,
            self.dataplane,
            self.executor,
            (),
            lambda: -1,
            DirectRoom(self.dataplane, self.loop, 0.9),
        )

    def commands(self, control: ControlSocket) -> Commands:
        """What comes in at that socket."""
        groups = Groups(self.driver, control, self.preparation, self.program, self.dataplane)
        return Commands(
            self.driver,
            control,
            self.program,
            self.preparation,
            groups,
            Scripts(
                self.driver,
                self.loop,
                self.children,
                self.executor,
                control,
                self.settings,
                lambda frame: None,
                lambda: groups.waiting,
                lambda: False,
            ),
            Stores(self.driver, control, lambda frame: None, lambda: 1),
            self.prober,
            self.dataplane,
            self.user.name,
            dict,
            lambda: None,
        )

    def begin(self, task: Task) -> tuple[list[Any], list[str]]:
        """A task; its outcome, or why it has none, once it is done."""
        outcomes: list[Any] = []
        errors: list[str] = []
        begin = self.life._tasks.begin(
            None,
            task,
            lambda now, outcome: outcomes.append(outcome) or [],  # type: ignore[func-returns-value]
            lambda now, reason: errors.append(reason) or [],  # type: ignore[func-returns-value]
        )
        self.executor.begin_task(begin)
        return outcomes, errors

    def step(self) -> None:
        """One pass, as the agent makes it."""
        events = self.loop.wait(0.01)
        self.driver.now = time.monotonic()
        self.loop.handle(events)
        self.children.tick(self.driver.now)

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.step()

    def close(self) -> None:
        self.children.close()
        self.loop.drain()
        self.loop.close()
        assert not self.failures
