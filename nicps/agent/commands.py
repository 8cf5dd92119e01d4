# SPDX-License-Identifier: Apache-2.0
"""Messages at the agent's socket: commands, and training programs (docs/socket.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nicps.agent.control import ControlSocket
from nicps.agent.driver import Driver
from nicps.agent.group import Groups
from nicps.agent.peer import Peer
from nicps.agent.preparation import Preparation
from nicps.agent.probe import Prober
from nicps.agent.program import Program
from nicps.agent.scripts import Scripts
from nicps.agent.stores import Stores
from nicps.dataplane import DataPlane
from nicps.errors import (
    JobFailed,
    MessageError,
    NetworkProblem,
    NicpsError,
    UsageProblem,
    explain,
)
from nicps.session.events import Preparing
from nicps.session.messages import (
    AskProbe,
    AskStatus,
    Attach,
    Cancel,
    JoinGroup,
    Leave,
    Ok,
    Status,
    Submit,
    Watch,
    decode_command,
)
from nicps.session.shared_form import FROM_PROGRAM, FromProgram


class Commands:
    """Handles messages of peers, by what the peers may do.

    Args:
        trainer: the user that may attach a training program, by name.
        status: what `nicps status` shows.
        stop: lets the agent leave.
    """

    def __init__(
        self,
        driver: Driver,
        control: ControlSocket,
        program: Program,
        preparation: Preparation,
        groups: Groups,
        scripts: Scripts,
        stores: Stores,
        prober: Prober,
        dataplane: DataPlane,
        trainer: str,
        status: Callable[[], Status],
        stop: Callable[[], None],
    ) -> None:
        self._driver, self._control, self._program = driver, control, program
        self._preparation, self._groups, self._scripts = preparation, groups, scripts
        self._stores, self._prober, self._dataplane = stores, prober, dataplane
        self._trainer, self._status, self._stop = trainer, status, stop

    def take_message(self, peer: Peer, message: dict[str, Any]) -> None:
        """Handle one message; an error is answered to the peer."""
        driver = self._driver
        try:
            if peer.uses_store:
                self._stores.take_message(peer, message)
            elif not peer.is_trainer:
                self._carry_out(peer, message)
            elif self._program.is_attached(peer.channel):
                self._program.handle_message(_of_program(message))
        except (NicpsError, OSError) as error:
            if peer.is_trainer:
                reason = explain("go on with the job here", error)
                driver.carry_out(driver.life.action_failed(driver.now, reason))
            elif isinstance(error, NicpsError):
                peer.refuse(error)
            else:
                peer.refuse(JobFailed(explain("do that", error)))

    def forget(self, peer: Peer) -> None:
        """A connection has ended."""
        self._prober.forget(peer)
        self._groups.forget(peer)
        self._scripts.forget(peer)
        self._stores.forget(peer)
        if peer.is_trainer:
            self._program.detach(peer.channel)

    def _carry_out(self, peer: Peer, raw: Mapping[str, Any]) -> None:
        """Carry out a command, or refuse it."""
        if not peer.commands and raw.get("op") not in (Attach.op, JoinGroup.op):
            raise UsageProblem(
                f"user {peer.uid} may not give this agent commands: run it as root, or let the agent"
                " admit a group of yours (`nicps join --group NAME`)"
            )
        command = decode_command(raw)
        if isinstance(command, Attach):
            self._attach(peer, command.form)
        elif isinstance(command, JoinGroup):
            self._check_trains(peer)
            self._groups.join(peer, command)
        elif isinstance(command, AskStatus):
            peer.post(self._status())
        elif isinstance(command, Watch):
            peer.watches_all = True
        elif isinstance(command, Cancel):
            if not self._scripts.cancel("cancelled"):
                self._driver.carry_out(self._driver.life.cancel(self._driver.now))
            peer.post(Ok())
        elif isinstance(command, Leave):
            peer.post(Ok())
            self._stop()
        elif isinstance(command, AskProbe):
            self._prober.start(peer, command.seconds)
        elif isinstance(command, Submit):
            self._submit(peer, command)

    def _submit(self, peer: Peer, job: Submit) -> None:
        self._scripts.check_free()
        self._driver.life.check_free()
        self._dataplane.check_interface()
        peer.submission = self._preparation.begin(job)
        told = Preparing("", job.job)
        for other in self._control.peers[:]:
            if other is peer or other.watches_all:
                self._control.post(other, told)

    def _check_trains(self, peer: Peer) -> None:
        if not peer.trains:
            raise UsageProblem(f"user {peer.uid} may not train here, only {self._trainer}")

    def _attach(self, peer: Peer, form: str) -> None:
        self._check_trains(peer)
        if self._driver.life.part is None:
            raise NetworkProblem("no job is under way that a training program could join")
        if form == "json":  # another process reads megabytes of text
            self._control.hand_over(peer, self._program.start_gateway)
        else:
            self._program.attach(peer.channel)
            peer.is_trainer = True


def _of_program(raw: Mapping[str, Any]) -> FromProgram:
    """Handle a message of the training program.

    Raises:
        JobFailed: it is not a message that a training program may send.
    """
    try:
        return FROM_PROGRAM.decode(raw)
    except MessageError as error:
        raise JobFailed(f"the training program's {error}") from None
