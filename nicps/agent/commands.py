# SPDX-License-Identifier: Apache-2.0
"""What comes in at the agent's socket: commands, and training programs (docs/socket.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nicps.agent.control import VERSION
from nicps.agent.peer import Peer
from nicps.agent.status import status_of
from nicps.agent.submission import Submission
from nicps.errors import JobFailed, NetworkProblem, NicpsError, UsageProblem, explain
from nicps.protocol import NodeState

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
                    program.on_message(message)
            else:
                self._command(peer, message.get("op"), message)
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

    def _command(self, peer: Peer, op: object, message: Mapping[str, Any]) -> None:
        agent = self._agent
        if message.get("version", VERSION) != VERSION:
            raise UsageProblem(
                f"version {message['version']} of the socket's messages is unknown; this nicps speaks {VERSION}"
            )
        if op == "attach":
            self._attach(peer, message.get("form", "shared"))
        elif not peer.commands:
            raise UsageProblem(
                f"user {peer.uid} may not give this agent commands: run it as root, or let the agent"
                " admit a group of yours (`nicps join --group NAME`)"
            )
        elif op == "status":
            peer.post({"op": "status", **status_of(agent)})
        elif op == "watch":
            peer.watches_all = True
        elif op == "leave":
            peer.post({"op": "ok"})
            agent.stop()
        elif op == "probe":
            agent.prober.start(peer, message.get("seconds", 1.0))
        elif op == "submit":
            self._submit(peer, message)
        else:
            raise UsageProblem(f"the agent knows no {op!r}")

    def _submit(self, peer: Peer, message: Mapping[str, Any]) -> None:
        agent = self._agent
        waiting = agent.job is not None and agent.node.state is NodeState.STANDBY
        if agent.submission is not None or agent.node.state is not NodeState.STANDBY or waiting:
            way_out = "wait for its end (`nicps status --watch`)"
            if agent.trouble:
                way_out = f"{agent.trouble}. `nicps leave`, and `nicps join` again, give it up here"
            raise NetworkProblem(f"a job is under way: {way_out}")
        for name in ("job", "data", "resume"):
            path = message.get(name)
            if (path is not None or name == "job") and (not isinstance(path, str) or "\0" in path):
                raise UsageProblem(f"{name} is to be a path, not {path!r}")
        agent.dataplane.check_interface()
        agent.node.busy = True
        try:
            agent.submission = Submission(agent, message)
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
        elif form == "shared":
            agent.job.attach(peer.channel)
            peer.is_trainer = True
        else:
            raise UsageProblem(f"training programs attach in the form shared or json, not {form!r}")
