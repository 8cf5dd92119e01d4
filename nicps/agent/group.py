# SPDX-License-Identifier: Apache-2.0
"""A program on this host that waits for a group (`nicps.collective`), until it is a member or gives up."""

from __future__ import annotations

import math
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
from nicps.job.actions import GroupCalled
from nicps.job.plan import is_group
from nicps.job.under_way import UnderWay
from nicps.protocol import Group, NodeState
from nicps.session.messages import JoinGroup
from nicps.session.shared_form import Late
from nicps.wire import MOST_SIZED

_ROOM = 8000  # fragments of a round at most: 11.5 MB
_ENDING_S = 3.0  # after the end of a job here, in which others may not have heard of it
_AGAIN_S = 0.3  # between two calls of a host that was told within that time of a job elsewhere
_UNHEARD_S = 30.0  # without a call of the group that a program wants to come into
assert _ROOM <= MOST_SIZED


@dataclass(slots=True)
class _Waiting:
    """A program that waits, and the begin and end of its wait.

    `heard`: when the group that it wants to come into late was last heard of. `begins_at`: no group is begun before.
    """

    peer: Peer
    wanted: JoinGroup
    since: float
    until: float
    heard: float
    begins_at: float = -math.inf


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
        self._in_job = -math.inf  # when this host was in a job last

    def join(self, peer: Peer, wanted: JoinGroup) -> None:
        """A program wants to be a member. `tick` answers it.

        Raises:
            NetworkProblem: another one waits already, or a job is under way.
        """
        if self._waiting is not None:
            raise NetworkProblem(
                "another program on this host waits for a group already: a host has one in a group"
            )
        if not wanted.late:  # a host that was unplugged comes back once it hears the others again
            self._dataplane.check_interface()
        self._driver.life.roles.publisher.other_job = ""  # its lead now answers our calls
        now, life = self._driver.now, self._driver.life
        self._waiting = _Waiting(peer, wanted, now, now + wanted.timeout_s, now)
        life.comes_late = (wanted.name, wanted.size) if wanted.late else None
        self.tick()

    @property
    def waiting(self) -> bool:
        """Whether a program waits because its group has not formed."""
        return self._waiting is not None and not self._waiting.wanted.late

    def note_call(self, call: GroupCalled) -> None:
        """The lead of a group under way calls: it may be the one that a program here wants to come into."""
        waiting = self._waiting
        if waiting is not None and call.group.is_for(waiting.wanted.name, waiting.wanted.size):
            waiting.heard = self._driver.now

    def forget(self, peer: Peer) -> None:
        """A connection has ended."""
        if self._waiting is not None and self._waiting.peer is peer:
            self._stop_waiting("its program has gone")

    def tick(self) -> None:
        """Make the program a member if its group is here; otherwise let the group form."""
        waiting, life, driver = self._waiting, self._driver.life, self._driver
        if life.part is not None:
            self._in_job = driver.now
        if waiting is None:
            self._leave_without_program()
            return
        part, publisher = life.part, life.roles.publisher
        try:
            if publisher.other_job and not waiting.wanted.late:
                other, publisher.other_job = publisher.other_job, ""
                self._note_other(waiting, other)
            elif part is not None and part.job.digest and self._is_member:
                self._enter(waiting, part.job.settings)
            elif waiting.wanted.late:
                self._watch_calls(waiting)
            elif not life.busy_with and driver.now >= waiting.begins_at:
                group = Group(_key(waiting.wanted), waiting.wanted.size)
                number = life.form_group(group)
                self._preparation.begin_group(number, _prepared(waiting.wanted))
            if self._waiting is not None and driver.now >= waiting.until:
                self._give_up(waiting)
        except NicpsError as error:
            self._refuse(waiting, error)

    @property
    def _is_member(self) -> bool:
        """This host is in the view, and stays there: it may just be leaving for the sake of a program before."""
        node = self._driver.life.node
        return node.state is NodeState.MEMBER and not node.leaving

    def _note_other(self, waiting: _Waiting, other: str) -> None:
        """A job or group is under way on the network. If it is the program's own group, the program may come in
        later.

        Other hosts may still be ending the job that this one has just ended: then the program asks again. Meanwhile it
        begins no group, which would be one of this host alone if the others go on.
        """
        if (now := self._driver.now) < self._in_job + _ENDING_S:
            reason = (
                f"{other} is under way, perhaps only until all have heard of its end: it asks again"
            )
            self._driver.carry_out(self._driver.life.withdraw_group(now, reason)[0])
            waiting.begins_at = now + _AGAIN_S
            return
        group, wanted = UnderWay.read(other), waiting.wanted
        if group is not None and group.is_for(wanted.name, wanted.size):
            self._tell_late(waiting, group.members)
            return
        raise NetworkProblem(
            f"{'' if group else 'job '}{other} is under way on this network, without this host: wait for its end"
        )

    def _tell_late(self, waiting: _Waiting, members: int) -> None:
        self._stop_waiting("it is under way, and the program comes into it")
        waiting.peer.post(Late(members))

    def _watch_calls(self, waiting: _Waiting) -> None:
        """The lead of the group calls hosts on standby, for as long as the group exists (`note_call`)."""
        life, now = self._driver.life, self._driver.now
        if life.part is not None or life.node.state is NodeState.MEMBER:
            waiting.heard = now
        elif now >= waiting.heard + _UNHEARD_S:
            raise NetworkProblem(
                f"nothing was heard of group {waiting.wanted.name!r} for {_UNHEARD_S:.0f} s: if it has ended, start the"
                " program again on every host; if it goes on elsewhere, this host does not hear its lead"
            )

    @property
    def _taken_in(self) -> bool:
        """This host has been taken into a group, for a program that may have gone meanwhile."""
        node, part = self._driver.life.node, self._driver.life.part
        return part is not None and part.job.group and node.number in node.learners

    def _leave_without_program(self) -> None:
        life = self._driver.life
        if self._program.expects and self._taken_in and not life.node.leaving:
            reason = "the program that was to come into the group has gone"
            self._driver.carry_out(life.action_failed(self._driver.now, reason))

    def _enter(self, waiting: _Waiting, settings: dict[str, Any]) -> None:
        """Whether the job that is here is the program's group."""
        wanted = waiting.wanted
        if not is_group(settings):
            raise NetworkProblem(
                "a job has begun on this host: start the program again after its end"
            )
        here = settings["group"]
        size = here["size"] if wanted.late or self._taken_in else wanted.size
        if (here["name"], here["size"]) != (wanted.name, size):
            raise NetworkProblem(
                f"the group that has formed is {_text(here['name'], here['size'])}, and this program waits for"
                f" {_text(wanted.name, wanted.size)}"
            )
        if not self._program.expects:
            if self._program.attached and self._driver.now >= waiting.since + _ENDING_S:
                raise NetworkProblem(
                    f"another program on this host is in group {wanted.name!r} already: a host has one in a group"
                )
            return
        if self._taken_in and not wanted.late:  # the host leaves, and comes back for this program
            self._tell_late(waiting, len(self._driver.life.node.view.members))
            return
        self._waiting = self._driver.life.comes_late = None
        self._driver.life.node.wait_for(None)
        waiting.peer.is_trainer = True
        self._program.attach(waiting.peer.channel)

    def _give_up(self, waiting: _Waiting) -> None:
        wanted = waiting.wanted
        found = self._stop_waiting(f"not all have come within {wanted.timeout_s:g} s")
        there = f": found {', '.join(found)}" if found else ""
        raise NetworkProblem(
            f"group {_text(wanted.name, wanted.size)} has not formed within {wanted.timeout_s:g} s{there}; start the"
            " program on every host, with the same name and size"
        )

    def _stop_waiting(self, reason: str) -> tuple[str, ...]:
        self._waiting = self._driver.life.comes_late = None
        actions, found = self._driver.life.withdraw_group(self._driver.now, reason)
        self._driver.carry_out(actions)
        return found

    def _refuse(self, waiting: _Waiting, error: NicpsError) -> None:
        if self._waiting is waiting:
            self._stop_waiting(str(error))
        waiting.peer.refuse(error)


def _text(name: str, size: int) -> str:
    return f"{name!r} of {size} hosts" if size else f"{name!r} of all hosts"


def _key(wanted: JoinGroup) -> int:
    """1 to 65535."""
    return zlib.crc32(f"{wanted.name}/{wanted.size}".encode()) % 65535 + 1


def _prepared(wanted: JoinGroup) -> dict[str, Any]:
    """Make the content of the hand-out: only the settings."""
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
