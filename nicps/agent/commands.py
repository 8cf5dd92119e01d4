# SPDX-License-Identifier: Apache-2.0
"""What comes in at the agent's socket: commands, and training programs (docs/socket.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

<<<<<<< HEAD
from nicps.agent.control import VERSION, ControlSocket
from nicps.agent.driver import Driver
from nicps.agent.peer import Peer
from nicps.agent.preparation import Preparation
from nicps.agent.probe import Prober
from nicps.agent.program import Program
from nicps.dataplane import DataPlane
from nicps.errors import JobFailed, NetworkProblem, NicpsError, UsageProblem, explain
=======
from nicps.agent.peer import Peer
from nicps.agent.status import status_of
from nicps.agent.submission import Submission
from nicps.errors import (
    JobFailed,
    MessageError,
    NetworkProblem,
    NicpsError,
    UsageProblem,
    explain,
)
from nicps.protocol import NodeState
from nicps.session.messages import (
    AskProbe,
    AskStatus,
    Attach,
    Leave,
    Ok,
    Submit,
    Watch,
    decode_command,
)
from nicps.session.shared_form import FROM_PROGRAM, FromProgram

if TYPE_CHECKING:
    from nicps.agent.agent import Agent
>>>>>>> 386b4f51db69c0c9f5d3aa70ff2283b7ed4a937a


class Commands:
    """Messages of peers, by what they may do.

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
        prober: Prober,
        dataplane: DataPlane,
        trainer: str,
        status: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
    ) -> None:
        self._driver, self._control, self._program = driver, control, program
        self._preparation, self._prober, self._dataplane = preparation, prober, dataplane
        self._trainer, self._status, self._stop = trainer, status, stop

    def take_message(self, peer: Peer, message: dict[str, Any]) -> None:
        """One message; what is wrong with it is answered."""
        driver = self._driver
        try:
<<<<<<< HEAD
            if not peer.is_trainer:
                self._take_command(peer, message.get("op"), message)
            elif self._program.is_attached(peer.channel):
                self._program.hear(message)
=======
            if peer.is_trainer:
                program = agent.job.program if agent.job is not None else None
                if program is not None and program.is_attached(peer.channel):
                    program.on_message(_of_program(message))
            else:
                self._carry_out(peer, message)
>>>>>>> 386b4f51db69c0c9f5d3aa70ff2283b7ed4a937a
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
        if peer.is_trainer:
            self._program.detach(peer.channel)

<<<<<<< HEAD
    def _take_command(self, peer: Peer, op: object, message: Mapping[str, Any]) -> None:
        if message.get("version", VERSION) != VERSION:
            raise UsageProblem(
                f"version {message['version']} of the socket's messages is unknown; this nicps speaks {VERSION}"
            )
        if op == "attach":
            self._attach(peer, message.get("form", "shared"))
        elif not peer.commands:
=======
    def _carry_out(self, peer: Peer, raw: Mapping[str, Any]) -> None:
        """Do what a command says, or refuse it."""
        agent = self._agent
        if not peer.commands and raw.get("op") != Attach.op:
>>>>>>> 386b4f51db69c0c9f5d3aa70ff2283b7ed4a937a
            raise UsageProblem(
                f"user {peer.uid} may not give this agent commands: run it as root, or let the agent"
                " admit a group of yours (`nicps join --group NAME`)"
            )
<<<<<<< HEAD
        elif op == "status":
            peer.post({"op": "status", **self._status()})
        elif op == "watch":
            peer.watches_all = True
        elif op == "leave":
            peer.post({"op": "ok"})
            self._stop()
        elif op == "probe":
            self._prober.start(peer, message.get("seconds", 1.0))
        elif op == "submit":
            self._submit(peer, message)
        else:
            raise UsageProblem(f"the agent knows no {op!r}")

    def _submit(self, peer: Peer, message: Mapping[str, Any]) -> None:
        self._driver.life.check_free()
        for name in ("job", "data", "resume"):
            path = message.get(name)
            if (path is not None or name == "job") and (not isinstance(path, str) or "\0" in path):
                raise UsageProblem(f"{name} must be a path, not {path!r}")
        self._dataplane.check_interface()
        peer.submission = self._preparation.begin(message)
=======
        command = decode_command(raw)
        if isinstance(command, Attach):
            self._attach(peer, command.form)
        elif isinstance(command, AskStatus):
            peer.post(status_of(agent))
        elif isinstance(command, Watch):
            peer.watches_all = True
        elif isinstance(command, Leave):
            peer.post(Ok())
            agent.stop()
        elif isinstance(command, AskProbe):
            agent.prober.start(peer, command.seconds)
        elif isinstance(command, Submit):
            self._submit(peer, command)

    def _submit(self, peer: Peer, job: Submit) -> None:
        agent = self._agent
        waiting = agent.job is not None and agent.node.state is NodeState.STANDBY
        if agent.submission is not None or agent.node.state is not NodeState.STANDBY or waiting:
            way_out = "wait for its end (`nicps status --watch`)"
            if agent.trouble:
                way_out = f"{agent.trouble}. `nicps leave`, and `nicps join` again, give it up here"
            raise NetworkProblem(f"a job is under way: {way_out}")
        agent.dataplane.check_interface()
        agent.node.busy = True
        try:
            agent.submission = Submission(agent, job)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageProblem(f"no job can be made of what was submitted: {error!r}") from None
        finally:
            agent.node.busy = agent.submission is not None
        peer.watches = True
>>>>>>> 386b4f51db69c0c9f5d3aa70ff2283b7ed4a937a

    def _attach(self, peer: Peer, form: str) -> None:
        if not peer.trains:
            raise UsageProblem(f"user {peer.uid} may not train here, only {self._trainer}")
        if self._driver.life.part is None:
            raise NetworkProblem("no job is under way that a training program could join")
        if form == "json":  # megabytes of text are for another process to read
<<<<<<< HEAD
            self._control.hand_over(peer, self._program.start_gateway)
        elif form == "shared":
            self._program.attach(peer.channel)
=======
            agent.control.hand_over(peer, agent.job.start_gateway)
        else:
            agent.job.attach(peer.channel)
>>>>>>> 386b4f51db69c0c9f5d3aa70ff2283b7ed4a937a
            peer.is_trainer = True


def _of_program(raw: Mapping[str, Any]) -> FromProgram:
    """What the training program says.

    Raises:
        JobFailed: it is not a message that a training program may send.
    """
    try:
        return FROM_PROGRAM.decode(raw)
    except MessageError as error:
        raise JobFailed(f"the training program's {error}") from None
