# SPDX-License-Identifier: Apache-2.0
"""`python -m nicps.gateway FD`: stands between the agent and a training program that speaks JSON (R8).

    program  <- JSON messages over FD, docs/socket.md ->  gateway  <- nicps.client.Session ->  agent

The agent hands such a program's connection to a process of its own: megabytes of text are read and written here,
without privileges, and the token never waits for them. A message that does not fit fails the job in one line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson

from nicps import gradient_json
from nicps.client import Commit, JobAborted, Phase, Session
from nicps.errors import GradientFormatError, JobFailed, MessageError, NicpsError
from nicps.session import json_form
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.fields import Message, encode
from nicps.session.messages import VERSION, Error, Ok
from nicps.session.shared_form import has_steps, is_planned

GRACE_S = 2.0  # for the agent to see why a program has gone, before we say that it has
NOBODY = 1 << 40  # samples that `Session.need` gives before anybody has contributed
IN_VECTOR = ("parameter", "buffer")
OK = Ok()
#: What a program may say before it has applied the sum that it has.
_WHILE_APPLYING = json_form.Applied | json_form.Report | json_form.Alive | json_form.Fail


class ProgramLeft(JobFailed):
    """The program's connection is of no more use."""


class Misfit(JobFailed):
    """The program sent what does not fit, or gives up."""


class Gateway:
    """Answers one program's messages, each with one message, out of its session with the agent.

    Args:
        tensors: entries of prepared.json's `model`, to hold the program's parameters against; None if there are none.
    """

    def __init__(
        self,
        program: Channel,
        session: Session,
        tensors: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.program = program
        self.session = session
        self._tensors = tensors
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._total = np.empty(0, np.float32)
        self._phase: Phase | None = None
        self._round = 0  # open here, 0: none
        self._offered = False
        self._commit: Commit | None = None  # whose sum the program has, but has not applied
        self._answers: dict[type[Message], Callable[[Any], Message]] = {
            json_form.Ready: self._ready,
            json_form.Next: self._next,
            json_form.Progress: self._progress,
            json_form.Contribute: self._contribute,
            json_form.Wait: self._wait,
            json_form.Applied: self._applied,
            json_form.Tally: self._tally,
            json_form.Decide: self._decide,
            json_form.Saved: self._saved,
            json_form.Loaded: self._loaded,
            json_form.Checkpoint: self._checkpoint,
            json_form.Report: self._report,
            json_form.Alive: self._alive,
            json_form.Fail: self._fail,
        }

    @property
    def ended(self) -> bool:
        """The program knows of the job's end, and may go."""
        return self._phase is not None and self._phase.kind == "end"

    def serve(self) -> NoReturn:
        """Welcome the program, then answer until something is raised.

        Raises:
            ProgramLeft: it has closed its connection, or sent no message.
            Misfit, GradientFormatError: it sent what does not fit, or gives up.
            nicps.client.JobAborted, ChannelClosed: the job was stopped; the agent has gone.
        """
        session = self.session
        answer: Message = json_form.Welcome(
            VERSION,
            session.number,
            session.members,
            session.name,
            session.view,
            session.lead,
            session.settings,
            session.workdir,
        )
        while True:
            try:
                self.program.send(encode(answer))
                message, fds = self.program.recv()  # the program computes: that has no time limit
            except ChannelClosed as error:
                raise ProgramLeft(str(error)) from None
            for fd in fds:  # nobody has a descriptor to give us
                os.close(fd)
            answer = self.answer(message)

    def answer(self, raw: Mapping[str, Any]) -> Message:
        """The answer to a message.

        Raises:
            NicpsError: as `serve`.
        """
        try:
            message = json_form.REQUESTS.decode(raw)
        except MessageError as error:
            raise Misfit(str(error)) from None
        if not self._shapes and not isinstance(message, json_form.Ready | json_form.Fail):
            raise Misfit(f"{message.op!r} comes before 'ready'")
        if self._commit is not None and not isinstance(message, _WHILE_APPLYING):
            raise Misfit(f"{message.op!r} comes before round {self._commit.round} is 'applied'")
        return self._answers[type(message)](message)

    # ---- getting ready

    def _ready(self, message: json_form.Ready) -> Message:
        if self._shapes:
            raise Misfit("'ready' comes twice")
        if has_steps(self.session.settings):
            raise Misfit(
                "a step of this job takes several rounds (rank or bucket_mb), and one of a program that speaks JSON one"
            )
        if is_planned(self.session.settings):
            raise Misfit("a step of this job has a plan (priorities), and JSON has no words for it")
        if (system := self.session.settings.get("system", "R")) != "R":
            raise Misfit(
                f"this job has parameter servers (system={system}), and JSON has no words for them"
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in message.parameters:
            if parameter.name in shapes:
                raise Misfit(f"ready: parameter {parameter.name!r} is there twice")
            shapes[parameter.name] = parameter.shape
        lanes = sum(_size(shape) for shape in shapes.values())
        if not lanes:
            raise Misfit("ready: there are no parameters")
        if self._tensors is not None:
            _check_model(shapes, self._tensors)
        self.session.ready(lanes, message.digest)
        self._shapes, self._total = shapes, np.empty(lanes, np.float32)
        return OK

    def _next(self, message: json_form.Next) -> Message:
        self._phase = phase = self.session.next_phase()
        self._round = phase.first_round if phase.kind in ("train", "test") else 0
        self._offered = False
        return json_form.Phase(
            phase.kind, phase.first_round, phase.number, phase.shares, *self._view()
        )

    def _view(self) -> tuple[int, tuple[int, ...], bool]:
        """The view in force, who is in it, and whether this member leads."""
        session = self.session
        return session.view, tuple(sorted(session.live)), session.lead

    def _saved(self, message: json_form.Saved) -> Message:
        self._check_state_phase(message.op, message.number, "save")
        self.session.saved(message.number, message.round, message.digest, message.error)
        return OK

    def _loaded(self, message: json_form.Loaded) -> Message:
        self._check_state_phase(message.op, message.number, "load")
        self.session.loaded(message.number, message.digest)
        return OK

    def _checkpoint(self, message: json_form.Checkpoint) -> Message:
        self.session.checkpoint(message.round)
        return OK

    # ---- rounds

    def _progress(self, message: json_form.Progress) -> Message:
        round_ = message.round
        self._check_round(message.op, round_, "train")
        if message.samples > self._share:
            raise Misfit(
                f'progress: "samples" is {message.samples}, not a whole number from 0 to {self._share}'
            )
        self.session.progress(round_, message.samples)
        need = self.session.need(round_)
        closed = self.session.closed(round_)
        return json_form.State(round_, None if need >= NOBODY else need, closed)

    def _contribute(self, message: json_form.Contribute) -> Message:
        round_ = message.round
        self._check_round(message.op, round_, "train")
        if self._offered:
            raise Misfit(f"round {round_}: a second gradient")
        try:
            arrays, samples = gradient_json.read(message.gradient, self._shapes)
        except GradientFormatError as error:
            raise GradientFormatError(f"round {round_}: the gradient is refused: {error}") from None
        if samples > self._share:
            raise Misfit(
                f"round {round_}: a gradient over {samples} samples; this member's share is {self._share}"
            )
        self._offered = True
        vector = np.concatenate([array.reshape(-1) for array in arrays.values()])
        self.session.contribute(round_, vector, samples)
        return OK

    def _wait(self, message: json_form.Wait) -> Message:
        round_ = message.round
        self._check_round(message.op, round_, "train")
        commit = self.session.wait_commit(round_)
        if commit is None:
            self._round = 0
            return json_form.Discarded(round_)
        total = self.session.sum(commit, self._total)
        self._round, self._offered, self._commit = round_ + 1, False, commit
        gradient = None
        if commit.samples:
            gradient = gradient_json.document(self._named(total), commit.samples)
        told = round_, commit.samples, commit.counted, gradient
        return json_form.Committed(*told, *self._view(), commit.checkpoint)

    def _applied(self, message: json_form.Applied) -> Message:
        commit = self._commit
        if commit is None:
            raise Misfit("applied: there is no sum to be applied")
        if message.round != commit.round:
            raise Misfit(f"applied: round {message.round}, but the sum is round {commit.round}'s")
        self.session.applied(commit, message.digest)
        self._commit = None
        return OK

    def _named(self, vector: gradient_json.Array) -> dict[str, gradient_json.Array]:
        named, first = {}, 0
        for name, shape in self._shapes.items():
            size = _size(shape)
            named[name] = vector[first : first + size].reshape(shape)
            first += size
        return named

    def _tally(self, message: json_form.Tally) -> Message:
        round_ = message.round
        self._check_round(message.op, round_, "test")
        totals = self.session.tally(round_, message.succeeded, message.failed)
        self._round = 0
        if totals is None:
            return json_form.Discarded(round_)
        succeeded, failed = totals
        return json_form.Tallied(round_, succeeded, failed, *self._view())

    # ---- decisions, and messages

    def _decide(self, message: json_form.Decide) -> Message:
        self.session.decide(message.round, message.what, checkpoint=message.checkpoint)
        return OK

    def _alive(self, message: json_form.Alive) -> Message:
        self.session.alive()
        return OK

    def _report(self, message: json_form.Report) -> Message:
        self.session.report(message.values)
        return OK

    def _fail(self, message: json_form.Fail) -> Message:
        raise Misfit(" ".join(message.message.split()))

    # ---- inside

    @property
    def _share(self) -> int:
        """Samples that this member works in a round of the phase (R13)."""
        return 0 if self._phase is None else self._phase.share_of(self.session.number)

    def _check_state_phase(self, op: str, number: int, kind: str) -> None:
        """Refuse a message that does not answer the phase in force, which must be of that kind."""
        phase = self._phase
        if phase is None or phase.kind != kind or phase.number != number:
            raise Misfit(f"{op!r} answers a phase of kind {kind!r}; {number} is none")

    def _check_round(self, op: str, round_: int, kind: str) -> None:
        """Refuse a message that is not about the open round, in a phase of that kind."""
        phase = self._phase
        if phase is None or phase.kind != kind:
            there = "no phase has begun" if phase is None else f"the phase's kind is {phase.kind!r}"
            raise Misfit(f"{op!r} belongs to a phase of kind {kind!r}, but {there}")
        if round_ != self._round:
            now = f"round {self._round} is" if self._round else "none is; ask for the 'next' phase"
            raise Misfit(f"{op}: round {round_} is not open, {now}")


def _check_model(
    shapes: Mapping[str, tuple[int, ...]], tensors: Sequence[Mapping[str, Any]]
) -> None:
    """Hold the program's parameters against the model that was handed out."""
    due = {entry["name"]: tuple(entry["shape"]) for entry in tensors if entry["kind"] in IN_VECTOR}
    for name, shape in shapes.items():
        if name not in due:
            raise Misfit(f"ready: parameter {name!r}: the model handed out has none of that name")
        if shape != due[name]:
            raise Misfit(
                f"ready: parameter {name!r}: shape is {list(shape)}, the model's is {list(due[name])}"
            )
    for name in due:
        if name not in shapes:
            raise Misfit(f"ready: parameter {name!r} is missing")
    if list(due) != list(shapes):
        name = next(a for a, b in zip(shapes, due, strict=True) if a != b)
        raise Misfit(f"ready: parameter {name!r} is out of order; prepared.json has the order")


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def run(program: Channel, session: Session, tensors: Sequence[Mapping[str, Any]] | None) -> None:
    """Serve `program` until it leaves; what goes wrong is told to both sides."""
    gateway = Gateway(program, session, tensors)
    try:
        gateway.serve()
    except ProgramLeft as error:
        if gateway.ended:
            return
        _report_error(program, error)
        time.sleep(GRACE_S)  # its own last words are worth more: with them the agent ends us
        session.fail(f"the training program has left: {error}")
    except (JobAborted, ChannelClosed) as error:
        _report_error(program, error)
    except NicpsError as error:
        session.fail(str(error))
        _report_error(program, error)


def _report_error(program: Channel, error: NicpsError) -> None:
    with contextlib.suppress(ChannelClosed):
        program.send(encode(Error.of(error)))


def _tensors(workdir: str) -> Sequence[Mapping[str, Any]] | None:
    """`model` of the prepared.json that was handed out, if it has one."""
    prepared = orjson.loads(Path(workdir, "prepared.json").read_bytes())
    tensors: Sequence[Mapping[str, Any]] | None = prepared.get("model")
    return tensors


def main(arguments: Sequence[str]) -> int:
    """Serve the connection whose descriptor is the argument; the agent's socket is NICPS_SOCKET."""
    program = Channel(socket.socket(fileno=int(arguments[0])))
    try:
        session = Session.attach()
    except NicpsError as error:
        _report_error(program, error)
        print(error, file=sys.stderr)
        return 0  # told; for the job it means nothing
    with contextlib.closing(program), contextlib.closing(session):
        run(program, session, _tensors(session.workdir))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
