# SPDX-License-Identifier: Apache-2.0
"""What comes in at the agent's socket: commands, and training programs (docs/socket.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


class Commands:
    """Messages of peers, by what they may do."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        """One message; what is wrong with it is answered."""
        agent = self._agent
        try:
            if peer.is_trainer:
                program = agent.job.program if agent.job is not None else None
                if program is not None and program.is_attached(peer.channel):
                    program.on_message(_of_program(message))
            else:
                self._carry_out(peer, message)
        except (NicpsError, OSError) as error:
            reason = explain("go on with the job here" if peer.is_trainer else "do that", error)
            if peer.is_trainer:
                agent.act(agent.node.fail(agent.now, reason))
            else:
                peer.refuse(error if isinstance(error, NicpsError) else JobFailed(reason))

    def on_close(self, peer: Peer) -> None:
        """A connection has ended."""
        self._agent.prober.forget(peer)
        program = self._agent.job.program if self._agent.job is not None else None
        if peer.is_trainer and program is not None and program.is_attached(peer.channel):
            program.detached()

    def _carry_out(self, peer: Peer, raw: Mapping[str, Any]) -> None:
        """Do what a command says, or refuse it."""
        agent = self._agent
        if not peer.commands and raw.get("op") != Attach.op:
            raise UsageProblem(
                f"user {peer.uid} may not give this agent commands: run it as root, or let the agent"
                " admit a group of yours (`nicps join --group NAME`)"
            )
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

    def _attach(self, peer: Peer, form: str) -> None:
        agent = self._agent
        if not peer.trains:
            raise UsageProblem(f"user {peer.uid} may not train here, only {agent.user.name}")
        if agent.job is None:
            raise NetworkProblem("no job is under way that a training program could join")
        if form == "json":  # megabytes of text are for another process to read
            agent.control.hand_over(peer, agent.job.start_gateway)
        else:
            agent.job.attach(peer.channel)
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
