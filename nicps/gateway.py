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
from typing import Any, NoReturn, TypeVar

import numpy as np
import orjson

from nicps import gradient_json
from nicps.client import Commit, JobAborted, Phase, Session
from nicps.errors import GradientFormatError, JobFailed, NicpsError
from nicps.session.channel import Channel, ChannelClosed

VERSION = 1
GRACE_S = 2.0  # for the agent to see why a program has gone, before we say that it has
NOBODY = 1 << 40  # samples that `Session.need` gives before anybody has contributed
DECISIONS = ("continue", "test", "end")
IN_VECTOR = ("parameter", "buffer")
_MAX_ROUND = 2**32 - 1
_MAX_TALLY = 2**31 - 1  # a lane on the wire
_MAX_DIGEST = 128  # characters
Message = dict[str, Any]
T = TypeVar("T", str, list[Any], dict[str, Any])


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
        self._answers: dict[str, Callable[[Message], Message]] = {
            "ready": self._ready,
            "next": self._next,
            "progress": self._progress,
            "contribute": self._contribute,
            "wait": self._wait,
            "applied": self._applied,
            "tally": self._tally,
            "decide": self._decide,
            "saved": self._saved,
            "loaded": self._loaded,
            "checkpoint": self._checkpoint,
            "report": self._report,
            "alive": self._alive,
            "fail": self._fail,
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
        answer: Message = {
            "op": "welcome",
            "version": VERSION,
            "number": session.number,
            "members": session.members,
            "name": session.name,
            "view": session.view,
            "lead": session.lead,
            "settings": session.settings,
            "workdir": session.workdir,
        }
        while True:
            try:
                self.program.send(answer)
                message, fds = self.program.recv()  # the program computes: that has no time limit
            except ChannelClosed as error:
                raise ProgramLeft(str(error)) from None
            for fd in fds:  # nobody has a descriptor to give us
                os.close(fd)
            answer = self.answer(message)

    def answer(self, message: Message) -> Message:
        """The answer to a message.

        Raises:
            NicpsError: as `serve`.
        """
        op = message.get("op")
        answer = self._answers.get(op) if isinstance(op, str) else None
        if answer is None:
            raise Misfit(f'the message\'s "op" is {op!r}; known are {", ".join(self._answers)}')
        if not self._shapes and op not in ("ready", "fail"):
            raise Misfit(f"{op!r} comes before 'ready'")
        if self._commit is not None and op not in ("applied", "report", "alive", "fail"):
            raise Misfit(f"{op!r} comes before round {self._commit.round} is 'applied'")
        return answer(message)

    # ---- getting ready

    def _ready(self, message: Message) -> Message:
        if self._shapes:
            raise Misfit("'ready' comes twice")
        digest = _digest(message)
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in _field(message, "parameters", list):
            if not isinstance(entry, dict):
                raise Misfit(f"ready: {entry!r:.60} among the parameters is no object")
            name, shape = _field(entry, "name", str), _field(entry, "shape", list)
            if any(type(size) is not int or size < 0 for size in shape):
                raise Misfit(f"ready: parameter {name!r}: {shape!r:.60} is no shape")
            if name in shapes:
                raise Misfit(f"ready: parameter {name!r} is there twice")
            shapes[name] = tuple(shape)
        lanes = sum(_size(shape) for shape in shapes.values())
        if not lanes:
            raise Misfit("ready: there are no parameters")
        if self._tensors is not None:
            _check_model(shapes, self._tensors)
        self.session.ready(lanes, digest)
        self._shapes, self._total = shapes, np.empty(lanes, np.float32)
        return {"op": "ok"}

    def _next(self, message: Message) -> Message:
        self._phase = phase = self.session.next_phase()
        self._round = phase.first_round if phase.kind in ("train", "test") else 0
        self._offered = False
        return {
            "op": "phase",
            "kind": phase.kind,
            "first_round": phase.first_round,
            "number": phase.number,
            "shares": list(phase.shares),
            **self._view(),
        }

    def _view(self) -> Message:
        session = self.session
        return {"view": session.view, "live": sorted(session.live), "lead": session.lead}

    def _saved(self, message: Message) -> Message:
        number, digest = self._state_phase(message, "save"), _digest(message)
        round_ = _whole(message, "round", 0, _MAX_ROUND)
        self.session.saved(number, round_, digest, str(message.get("error", "")))
        return {"op": "ok"}

    def _loaded(self, message: Message) -> Message:
        number = self._state_phase(message, "load")
        self.session.loaded(number, _digest(message))
        return {"op": "ok"}

    def _checkpoint(self, message: Message) -> Message:
        self.session.checkpoint(_whole(message, "round", 0, _MAX_ROUND))
        return {"op": "ok"}

    # ---- rounds

    def _progress(self, message: Message) -> Message:
        round_ = self._open_round(message, "train")
        self.session.progress(round_, _whole(message, "samples", 0, self._share))
        need = self.session.need(round_)
        return {
            "op": "state",
            "round": round_,
            "need": None if need >= NOBODY else need,
            "closed": self.session.closed(round_),
        }

    def _contribute(self, message: Message) -> Message:
        round_ = self._open_round(message, "train")
        if self._offered:
            raise Misfit(f"round {round_}: a second gradient")
        try:
            arrays, samples = gradient_json.read(message.get("gradient"), self._shapes)
        except GradientFormatError as error:
            raise GradientFormatError(f"round {round_}: the gradient is refused: {error}") from None
        if samples > self._share:
            raise Misfit(
                f"round {round_}: a gradient over {samples} samples; this member's share is {self._share}"
            )
        self._offered = True
        vector = np.concatenate([array.reshape(-1) for array in arrays.values()])
        self.session.contribute(round_, vector, samples)
        return {"op": "ok"}

    def _wait(self, message: Message) -> Message:
        round_ = self._open_round(message, "train")
        commit = self.session.wait_commit(round_)
        if commit is None:
            self._round = 0
            return {"op": "discarded", "round": round_}
        total = self.session.sum(commit, self._total)
        self._round, self._offered, self._commit = round_ + 1, False, commit
        gradient = None
        if commit.samples:
            gradient = gradient_json.document(self._named(total), commit.samples)
        counted = {str(number): samples for number, samples in sorted(commit.counted.items())}
        return {
            "op": "committed",
            "round": round_,
            "samples": commit.samples,
            "counted": counted,
            "gradient": gradient,
            **self._view(),
        }

    def _applied(self, message: Message) -> Message:
        commit = self._commit
        if commit is None:
            raise Misfit("applied: there is no sum to be applied")
        round_ = _whole(message, "round", 1, _MAX_ROUND)
        if round_ != commit.round:
            raise Misfit(f"applied: round {round_}, but the sum is round {commit.round}'s")
        self.session.applied(commit, _digest(message))
        self._commit = None
        return {"op": "ok"}

    def _named(self, vector: gradient_json.Array) -> dict[str, gradient_json.Array]:
        named, first = {}, 0
        for name, shape in self._shapes.items():
            size = _size(shape)
            named[name] = vector[first : first + size].reshape(shape)
            first += size
        return named

    def _tally(self, message: Message) -> Message:
        round_ = self._open_round(message, "test")
        counts = [_whole(message, key, 0, _MAX_TALLY) for key in ("succeeded", "failed")]
        totals = self.session.tally(round_, *counts)
        self._round = 0
        if totals is None:
            return {"op": "discarded", "round": round_}
        succeeded, failed = totals
        return {
            "op": "tallied",
            "round": round_,
            "succeeded": succeeded,
            "failed": failed,
            **self._view(),
        }

    # ---- decisions, and messages

    def _decide(self, message: Message) -> Message:
        what = _field(message, "what", str)
        if what not in DECISIONS:
            raise Misfit(f'decide: "what" is {what!r}; it must be {", ".join(DECISIONS)}')
        self.session.decide(_whole(message, "round", 1, _MAX_ROUND), what)
        return {"op": "ok"}

    def _alive(self, message: Message) -> Message:
        self.session.alive()
        return {"op": "ok"}

    def _report(self, message: Message) -> Message:
        self.session.report(_field(message, "values", dict))
        return {"op": "ok"}

    def _fail(self, message: Message) -> Message:
        raise Misfit(" ".join(_field(message, "message", str).split()))

    # ---- inside

    @property
    def _share(self) -> int:
        """Samples that this member works in a round of the phase (R13)."""
        return 0 if self._phase is None else self._phase.share_of(self.session.number)

    def _state_phase(self, message: Message, kind: str) -> int:
        """The number of the phase in force, which must be of that kind."""
        phase, op = self._phase, message["op"]
        number = _whole(message, "number", 0, _MAX_ROUND)
        if phase is None or phase.kind != kind or phase.number != number:
            raise Misfit(f"{op!r} answers a phase of kind {kind!r}; {number} is none")
        return number

    def _open_round(self, message: Message, kind: str) -> int:
        op, phase = message["op"], self._phase
        if phase is None or phase.kind != kind:
            there = "no phase has begun" if phase is None else f"the phase's kind is {phase.kind!r}"
            raise Misfit(f"{op!r} belongs to a phase of kind {kind!r}, but {there}")
        round_ = _whole(message, "round", 1, _MAX_ROUND)
        if round_ != self._round:
            now = f"round {self._round} is" if self._round else "none is; ask for the 'next' phase"
            raise Misfit(f"{op}: round {round_} is not open, {now}")
        return round_


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


def _field(message: Message, key: str, kind: type[T]) -> T:
    value = message.get(key)
    if not isinstance(value, kind):
        kinds = {str: "a text", list: "a list", dict: "an object"}
        where = message.get("op") or message.get("name") or "ready"
        raise Misfit(f'{where}: "{key}" is {value!r:.60}, not {kinds[kind]}')
    return value


def _digest(message: Message) -> str:
    digest = _field(message, "digest", str)
    if len(digest) > _MAX_DIGEST:
        raise Misfit(f'{message["op"]}: "digest" has more than {_MAX_DIGEST} characters')
    return digest


def _whole(message: Message, key: str, least: int, most: int) -> int:
    value = message.get(key)
    if type(value) is not int or not least <= value <= most:
        raise Misfit(
            f'{message.get("op")}: "{key}" is {value!r:.60}, not a whole number from {least} to {most}'
        )
    return value


def run(program: Channel, session: Session, tensors: Sequence[Mapping[str, Any]] | None) -> None:
    """Serve `program` until it leaves; what goes wrong is told to both sides."""
    gateway = Gateway(program, session, tensors)
    try:
        gateway.serve()
    except ProgramLeft as error:
        if gateway.ended:
            return
        _tell(program, error)
        time.sleep(GRACE_S)  # its own last words are worth more: with them the agent ends us
        session.fail(f"the training program has left: {error}")
    except (JobAborted, ChannelClosed) as error:
        _tell(program, error)
    except NicpsError as error:
        session.fail(str(error))
        _tell(program, error)


def _tell(program: Channel, error: NicpsError) -> None:
    with contextlib.suppress(ChannelClosed):
        program.send({"op": "error", "message": str(error), "exit_code": error.exit_code})


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
        _tell(program, error)
        print(error, file=sys.stderr)
        return 0  # told; for the job it means nothing
    with contextlib.closing(program), contextlib.closing(session):
        run(program, session, _tensors(session.workdir))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
