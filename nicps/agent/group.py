# SPDX-License-Identifier: Apache-2.0
"""A program on this host that waits for a group (`nicps.collective`), until it is a member or gives up."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from nicps.agent.control import ControlSocket
from nicps.agent.driver import Driver
from nicps.agent.peer import Peer
from nicps.agent.preparation import Preparation
from nicps.agent.program import Program
from nicps.dataplane import DataPlane
from nicps.errors import NetworkProblem, NicpsError
from nicps.job.plan import is_group
from nicps.protocol import Group, NodeState
from nicps.session.messages import JoinGroup
from nicps.wire import MOST_SIZED

_ROOM = 8000  # fragments of a round at most: 11.5 MB
assert _ROOM <= MOST_SIZED


@dataclass(slots=True)
class _Waiting:
    """A program that waits, and until when."""

    peer: Peer
    wanted: JoinGroup
    until: float


class Groups:
    """One program at a time waits for its group."""

    def __init__(
        self,
        driver: Driver,
        control: ControlSocket,
        preparation: Preparation,
        program: Program,
        dataplane: DataPlane,
    ) -> None:
        self._driver, self._control = driver, control
        self._preparation, self._program, self._dataplane = preparation, program, dataplane
        self._waiting: _Waiting | None = None

    def join(self, peer: Peer, wanted: JoinGroup) -> None:
        """A program wants to be a member. It is answered in `tick`.

        Raises:
            NetworkProblem: another one waits already, or a job is under way.
        """
        if self._waiting is not None:
            raise NetworkProblem("another program on this host waits for a group already")
        self._dataplane.check_interface()
        self._driver.life.roles.publisher.other_job = ""  # what is under way now answers our calls
        self._waiting = _Waiting(peer, wanted, self._driver.now + wanted.timeout_s)
        self.tick()

    @property
    def waiting(self) -> bool:
        """A program waits, as its group has not formed."""
        return self._waiting is not None

    def forget(self, peer: Peer) -> None:
        """That connection has ended."""
        if self._waiting is not None and self._waiting.peer is peer:
            self._stop_waiting()

    def tick(self) -> None:
        """Make the program a member if its group is here; otherwise see to it that the group forms."""
        waiting, life, driver = self._waiting, self._driver.life, self._driver
        if waiting is None:
            return
        part, publisher = life.part, life.roles.publisher
        try:
            if publisher.other_job:
                other, publisher.other_job = publisher.other_job, ""
                raise NetworkProblem(
                    f"job {other} is under way on this network, without this host: wait for its end"
                )
            if part is not None and part.digest and life.node.state is NodeState.MEMBER:
                self._enter(waiting, part.settings)
            elif not life.busy_with:
                group = Group(_key(waiting.wanted), waiting.wanted.size)
                number = life.form_group(group)
                self._preparation.begin_group(number, _prepared(waiting.wanted))
            if self._waiting is not None and driver.now >= waiting.until:
                self._give_up(waiting)
        except NicpsError as error:
            self._refuse(waiting, error)

    def _enter(self, waiting: _Waiting, settings: dict[str, Any]) -> None:
        """A job is here: the program's group, or another one."""
        wanted = waiting.wanted
        if not is_group(settings):
            raise NetworkProblem(
                "a job has begun on this host: start the program again after its end"
            )
        here = settings["group"]
        if (here["name"], here["size"]) != (wanted.name, wanted.size):
            raise NetworkProblem(
                f"the group that has formed is {_text(here['name'], here['size'])}, and this program waits for"
                f" {_text(wanted.name, wanted.size)}"
            )
        if not self._program.expects:
            return
        self._waiting = None
        self._driver.life.node.wait_for(None)
        waiting.peer.is_trainer = True
        self._program.attach(waiting.peer.channel)

    def _give_up(self, waiting: _Waiting) -> None:
        found = self._stop_waiting()
        wanted = waiting.wanted
        there = f": found {', '.join(found)}" if found else ""
        raise NetworkProblem(
            f"group {_text(wanted.name, wanted.size)} has not formed within {wanted.timeout_s:g} s{there}; start the"
            " program on every host, with the same name and size"
        )

    def _stop_waiting(self) -> tuple[str, ...]:
        self._waiting = None
        actions, found = self._driver.life.withdraw_group(self._driver.now)
        self._driver.carry_out(actions)
        return found

    def _refuse(self, waiting: _Waiting, error: NicpsError) -> None:
        if self._waiting is waiting:
            self._stop_waiting()
        waiting.peer.refuse(error)


def _text(name: str, size: int) -> str:
    return f"{name!r} of {size} hosts" if size else f"{name!r} of all hosts"


def _key(wanted: JoinGroup) -> int:
    """1 to 65535."""
    return zlib.crc32(f"{wanted.name}/{wanted.size}".encode()) % 65535 + 1


def _prepared(wanted: JoinGroup) -> dict[str, Any]:
    """What is handed out: the settings, and nothing else."""
    return {
        "job": f"group-{wanted.name}",
        "entry": "",
        "settings": {
            "group": {"name": wanted.name, "size": wanted.size},
            "room": _ROOM,
            "batch": 1,
            "lane": "i32",
            "exchange": "stripes",
        },
    }
