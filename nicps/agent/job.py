# SPDX-License-Identifier: Apache-2.0
"""One host's part in a job: its files, its training program, and what each phase asks of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from nicps import wire
from nicps.agent.bundle import WINDOW_BYTES, InStream, OutStream
from nicps.agent.process import Child, python, set_nice
from nicps.agent.records import Records
from nicps.dataplane.arena import Arena
from nicps.dataplane.channel import Channel, ChannelClosed
from nicps.dataplane.lanes import U8, LaneFormat
from nicps.errors import JobFailed, NicpsError
from nicps.protocol import Committed, Phase, SendFragments

if TYPE_CHECKING:
    from nicps.agent.agent import Agent

_KINDS = {wire.PhaseKind.TRAIN: "train", wire.PhaseKind.TEST: "test", wire.PhaseKind.FINISH: "end"}
_HURRIED = -10  # nice value
_MOST_ROUNDS = _MOST_SAMPLES = (1 << 31) - 1
_MOST_LANES = 1 << 33
_MOST_DIGEST = 128


@dataclass(slots=True)
class ArenaSource:
    """A contribution in the memory that the trainer writes."""

    arena: Arena
    hurry: Callable[[bool], None]

    def available(self, round_: int) -> int:
        """Converted so far."""
        return self.arena.converted(round_)

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """A view, no copy."""
        parity = round_ & 1
        lanes = self.arena.lanes[parity, first : first + count]
        return lanes, self.arena.shifts[parity, first : first + count]

    def sending(self, round_: int) -> None:
        """The trainer wants to know when."""
        self.arena.set_sending_since(round_, time.monotonic_ns())

    def awaited(self, yes: bool) -> None:
        """Everybody waits for this trainer now."""
        self.hurry(yes)


@dataclass(slots=True)
class StreamSource:
    """A window of a hand-out."""

    stream: OutStream
    first_round: int

    def available(self, round_: int) -> int:
        """Files are all there."""
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """Read from the files."""
        return self.stream.read(round_ - self.first_round, first, count), 0

    def sending(self, round_: int) -> None:
        """Nobody wants to know."""

    def awaited(self, yes: bool) -> None:
        """Files are always there."""


class LocalJob:
    """The job at this host, from the first hand-out decision to the stop."""

    def __init__(self, agent: Agent, job_id: str) -> None:
        self.agent = agent
        self.id = job_id
        self._base = working_folder(agent.settings.work)  # ours; what the trainer owns is inside
        self.folder = self._base / "work"
        for folder in (self.folder, self.folder / "out"):
            folder.mkdir()
            os.chown(folder, agent.user.uid, agent.user.gid)
        self.outgoing: OutStream | None = None  # what this host hands out next
        self.arena: Arena | None = None
        self.ready: dict[str, Any] | None = None  # the trainer's "ready"
        self.expected = 0  # fragments that the kernel must have added in the committed rounds
        self.added = 0  # fragments that it has added in them
        self.train_rounds = 0
        self._turns_before = agent.turns
        self._sent_again_before = agent.sent_again
        self.digest = ""
        self._phase: Phase | None = None
        self._source: ArenaSource | StreamSource | None = None
        self._in: InStream | None = None
        self._blocks = 0
        self._blocks_told = 0
        self._trainer: Child | None = None
        self._gateway: Child | None = None  # between the agent and a program that speaks JSON
        self._channel: Channel | None = None
        self._doorbell = -1
        self._waiting: Phase | None = None  # for the trainer to be ready
        self.records = Records(self._base)
        self._ended = False
        self._hurried = False
        self._offered_at = self._sending_s = 0.0  # of the round's contribution

    # ---- phases

    def prepare(self, phase: Phase) -> None:
        """A decision's turn has come; `agent.prepared` is called once this host is ready for it."""
        if phase.kind is wire.PhaseKind.HANDOUT:
            self._phase = phase
            self._prepare_handout(phase)
        elif phase.kind is wire.PhaseKind.STOP:
            self._phase = phase
            self.agent.prepared(phase.number)
        else:
            self._waiting = phase
            self._prepare_training()

    def source(self) -> ArenaSource | StreamSource:
        """Where the payload of this host's contribution is."""
        assert self._source is not None
        return self._source

    def committed(self, commit: Committed) -> None:
        """A round of the phase in force is committed."""
        phase = self._phase
        assert phase is not None
        others = len(set(commit.counted) - {self.agent.node.number})
        if phase.kind is wire.PhaseKind.HANDOUT:
            self._committed_window(phase, commit)
            return
        self.expected += others * phase.fragments_in(commit.round)
        self.added += self.agent.dataplane.count(commit.round, self.agent.node.view, 0)
        if phase.kind is wire.PhaseKind.TRAIN:
            self.train_rounds += 1
        agent = self.agent
        self._post(
            {
                "op": "committed",
                "round": commit.round,
                "counted": dict(commit.counted),
                "unit": commit.unit,
                "next_unit": commit.next_unit,
                "seconds_waited": max(0.0, agent.now - self._offered_at - self._sending_s),
            }
        )

    # ---- hand-out (R5, R6)

    def _prepare_handout(self, phase: Phase) -> None:
        agent, settings = self.agent, phase.settings
        self._allocate(phase.blocks)
        mine = settings["source"] == agent.node.number
        if mine:
            assert self.outgoing is not None
            self._source = StreamSource(self.outgoing, phase.first_round)
        if settings["purpose"] == "job":
            folder, keep = self.folder, True
        else:
            name = agent.node.members[settings["source"] - 1].name
            folder, keep = agent.run_folder(self.id) / name, agent.node.number == 1
            if keep:
                folder.mkdir(parents=True, exist_ok=True)
        owner = (agent.user.uid, agent.user.gid) if settings["purpose"] == "job" else (0, 0)
        self._in = InStream(
            folder,
            settings["bytes"],
            settings["index_bytes"],
            agent.node.number,
            len(agent.node.members),
            owner if os.geteuid() == 0 else (os.getuid(), os.getgid()),
            keep,
        )
        self._later(lambda: None, lambda: self._handout_prepared(phase, mine))

    def _handout_prepared(self, phase: Phase, mine: bool) -> None:
        """Windows of a hand-out before this one are on disk: their banks are free."""
        self.agent.prepared(phase.number)
        if mine:
            self.agent.act(self.agent.node.offer(self.agent.now, phase.first_round, 1))

    def _committed_window(self, phase: Phase, commit: Committed) -> None:
        """Store a window in the background; its bank is free once it is on disk."""
        agent, stream, round_ = self.agent, self._in, commit.round
        assert stream is not None
        window, last = round_ - phase.first_round, round_ == phase.last_round
        size = min(WINDOW_BYTES, phase.settings["bytes"] - window * WINDOW_BYTES)
        if isinstance(self._source, StreamSource) and phase.settings["source"] == agent.node.number:
            out = self._source.stream
            fragments = phase.fragments_in(round_)
            self._later(
                lambda: stream.write(out.read(window, 0, fragments).reshape(-1)[:size]),
                lambda: self._stored(phase, stream, round_, last),
            )
            if not last:
                agent.act(agent.node.offer(agent.now, round_ + 1, 1))
        else:
            bank = agent.dataplane.accumulators[round_ & 1]
            data = bank.view(np.uint8).reshape(-1)[:size]
            self._later(
                lambda: stream.write(data), lambda: self._stored(phase, stream, round_, last)
            )

    def _stored(self, phase: Phase, stream: InStream, round_: int, last: bool) -> None:
        """A window is on disk. The next phase may have begun meanwhile."""
        agent = self.agent
        agent.act(agent.node.read(agent.now, round_))
        if not last:
            return
        digest = stream.finish()
        if phase.settings["source"] == agent.node.number and self.outgoing is not None:
            self.outgoing.close()
            self.outgoing = None
        if phase.settings["purpose"] == "job":
            self.digest = digest
            self._start_trainer()
        agent.handed_out(phase, digest)

    def _later(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Work in the background, unless the job is over before it is done."""

        def unless_over() -> None:
            try:
                work()
            except Exception:
                if not self._ended:
                    raise

        self.agent.background(unless_over, lambda: None if self._ended else then())

    # ---- the training program (R8)

    def _start_trainer(self) -> None:
        settings = self.agent.settings
        argv = list(settings.trainer) or python(self.entry, "run", "--workdir", str(self.folder))
        self._trainer = self.agent.spawn(
            argv,
            self.folder,
            self._base / "trainer.log",
            self._trainer_ended,
            connected=True,
            network_access=self.prepared.get("settings", {}).get("network_access") is True,
        )

    @property
    def entry(self) -> str:
        """The training program's module, as the prepared job names it."""
        return str(self.prepared.get("entry", "trainer"))

    @property
    def prepared(self) -> dict[str, Any]:
        """prepared.json, as it was handed out."""
        try:
            value = orjson.loads((self.folder / "prepared.json").read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise JobFailed(f"the hand-out holds no readable prepared.json: {error}") from None
        assert isinstance(value, dict)
        return value

    def start_gateway(self, connection: int) -> None:
        """A program that speaks JSON has connected: a process of its own attaches for it (docs/socket.md).

        Raises:
            JobFailed: a training program is attached already.
        """
        if self._channel is not None or self._gateway is not None:
            raise JobFailed("a training program is attached already")
        argv = python("nicps.gateway", str(connection))
        self._gateway = self.agent.spawn(
            argv,
            self.folder,
            self._base / "gateway.log",
            self._gateway_ended,
            fds=(connection,),
            connected=True,
        )

    def _gateway_ended(self, code: int) -> None:
        gateway, self._gateway = self._gateway, None
        if code and gateway is not None and not self._ended:
            reason = f"the gateway ended: {gateway.last_line()}"
            self.agent.act(self.agent.node.fail(self.agent.now, reason))

    def attach(self, channel: Channel) -> None:
        """The training program has connected.

        Raises:
            JobFailed: one is attached already.
        """
        if self._channel is not None:
            raise JobFailed("a training program is attached already")
        self._channel = channel
        node = self.agent.node
        self._post(
            {
                "op": "welcome",
                "number": node.number,
                "members": [{"number": m.number, "name": m.name} for m in node.members],
                "name": self.agent.node.name,
                "lead": 1,
                "settings": self.prepared.get("settings", {}),
                "workdir": str(self.folder),
                "view": node.view,
            }
        )

    def on_message(self, message: Mapping[str, Any]) -> None:
        """A message from the training program."""
        agent = self.agent
        node, now, op = agent.node, agent.now, message["op"]
        if op == "progress":
            samples = _whole(message, "samples", 0, _MOST_SAMPLES)
            agent.act(node.progress(now, _whole(message, "round", 0, _MOST_ROUNDS), samples))
        elif op == "offer":
            round_ = _whole(message, "round", 0, _MOST_ROUNDS)
            samples = _whole(message, "samples", 1, _MOST_SAMPLES)
            unit = None if message["unit"] is None else _whole(message, "unit", -100, 100)
            self._offered_at = now
            agent.act(node.offer(now, round_, samples, unit))
        elif op == "read":
            round_ = _whole(message, "round", 0, _MOST_ROUNDS)
            if round_ < node.open_round:
                agent.act(node.read(now, round_))
        elif op == "prepared":
            if self._phase is not None and self._phase.number == message["number"]:
                if self._phase.kind is not wire.PhaseKind.FINISH:
                    agent.prepared(message["number"])
        elif op == "ready" and self.ready is None:
            lanes = _whole(message, "lanes", 1, _MOST_LANES)
            if not isinstance(message["digest"], str) or len(message["digest"]) > _MOST_DIGEST:
                raise JobFailed("the training program's digest is not a short text")
            self._make_arena(lanes)
            self.ready = dict(message)
            self._prepare_training()
            agent.trainer_ready(lanes, message["digest"])
        elif op in ("decide", "report") and self.ready is not None:
            agent.trainer_says(message)
        elif op == "fail":
            agent.act(node.fail(now, str(message["message"])))

    def _hurry(self, yes: bool) -> None:
        """A trainer whose gradient all hosts wait for gets the processor before other programs."""
        if self._hurried != yes and self._trainer is not None:
            self._hurried = yes
            set_nice(self._trainer.pid, _HURRIED if yes else 0)

    def is_attached(self, channel: Channel) -> bool:
        """Whether that connection is this job's training program."""
        return channel is self._channel

    def sent(self, action: SendFragments, started: float, ended: float) -> None:
        """Fragments of this host's contribution are with the kernel."""
        self._sending_s = ended - started + (self._sending_s if action.repair else 0.0)
        self.records.note("repair" if action.repair else "send", started, ended, action.round)

    def detached(self) -> None:
        """The training program has closed its connection."""
        self._channel = None

    def ring(self) -> None:
        """More of a contribution has been converted."""
        self.agent.pump()

    def need(self, round_: int, samples: int) -> None:
        """Tell the training program what still makes the quorum (R13)."""
        if self.arena is not None:
            self.arena.need = (round_, samples)

    def closed(self, round_: int) -> None:
        """Tell the training program that the round closed without it."""
        if self.arena is not None:
            self.arena.closed = round_

    def _make_arena(self, lanes: int) -> None:
        width = int(str(self.prepared["settings"].get("lane", "i16")).removeprefix("i"))
        fragments = LaneFormat(lanes, width).fragments
        self.arena = Arena.create(fragments)
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Every write wakes; reading it could block, as the trainer has a say in its flags.
        self.agent.watch(self._doorbell, self.ring, edge=True)
        self._post({"op": "arena", "fragments": fragments}, (self.arena.fd, self._doorbell))

    def _prepare_training(self) -> None:
        """Bring the training program into the phase that waits for it, if both are there."""
        phase = self._waiting
        if phase is None or self.ready is None or self.arena is None:
            return
        self._waiting = None
        agent = self.agent
        if phase.kind is not wire.PhaseKind.FINISH:
            if phase.settings["handout"] != self.digest:
                agent.act(agent.node.fail(agent.now, "what was handed out has arrived damaged"))
                return
            differs = phase.settings["model"] != self.ready["digest"]
            if phase.kind is wire.PhaseKind.TRAIN:
                differs |= phase.fragments != self.arena.fragments
            if differs:
                reason = (
                    "the model built here differs from node 1's: the same job.py and the same "
                    "versions of Python and PyTorch are needed on every host"
                )
                agent.act(agent.node.fail(agent.now, reason))
                return
        self._phase = phase
        message: dict[str, Any] = {
            "op": "phase",
            "kind": _KINDS[phase.kind],
            "first_round": phase.first_round,
            "number": phase.number,
            "unit": phase.unit,
            "view": agent.node.view,
            "live": [m.number for m in agent.node.members],
            "lead": 1,
            "shares": phase.shares,
        }
        self.arena.phase = phase.number
        self._source = ArenaSource(self.arena, self._hurry)
        if phase.blocks > self._blocks or phase.kind is wire.PhaseKind.TRAIN:
            self._allocate(phase.blocks)
        if self._blocks and self._blocks_told != self._blocks:
            self._blocks_told = self._blocks
            message["blocks"] = self._blocks
            self._post(message, (agent.dataplane.accumulators_fd, agent.dataplane.slots_fd))
        else:
            self._post(message)

    def _allocate(self, blocks: int) -> None:
        """Accumulators of the size that the phase needs; the old ones go."""
        if blocks and blocks != self._blocks:
            self.agent.dataplane.allocate(blocks)
            self._blocks, self._blocks_told = blocks, 0

    def _trainer_ended(self, code: int) -> None:
        trainer, self._trainer = self._trainer, None
        if self._ended or trainer is None:
            return
        agent = self.agent
        phase = self._phase
        if code or phase is None or phase.kind is not wire.PhaseKind.FINISH:
            agent.sender.drop_fragments()  # the rest of its gradient will not come
            reason = f"the training program ended: {trainer.last_line()}"
            agent.act(agent.node.fail(agent.now, reason))
            return
        kept = agent.run_folder(self.id) / agent.node.name
        facts = self._facts()
        names: list[str] = []
        self._later(
            lambda: names.extend(self.records.keep(self.folder / "out", self._base, facts, kept)),
            lambda: self._kept(phase, kept, names),
        )

    # ---- the end (R14)

    def _facts(self) -> dict[str, Any]:
        agent = self.agent
        return {
            "name": agent.node.name,
            "mac": wire.mac_text(agent.node.mac),
            "xdp_mode": agent.dataplane.mode,
            "rounds": self.train_rounds,
            "fragments_added": self.added,
            "fragments_expected": self.expected,
            "fragments_sent_again": agent.sent_again - self._sent_again_before,
            "token_turns": agent.turns - self._turns_before,
            "counters": agent.dataplane.counters(),
        }

    def _kept(self, phase: Phase, kept: Path, names: list[str]) -> None:
        """The results are in the run's folder: tell node 1 how much there is to collect."""
        agent = self.agent
        try:
            self.outgoing = OutStream(kept, [{"path": name, "store": "all"} for name in names])
        except NicpsError as error:
            agent.act(agent.node.fail(agent.now, str(error)))
            return
        sizes = {"bytes": self.outgoing.size, "index_bytes": len(self.outgoing.index)}
        agent.prepared(phase.number, orjson.dumps(sizes))

    def close(self, message: str) -> None:
        """The job is over, however it ended: stop the training program, remove its files."""
        self._ended = True
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.post({"op": "abort", "message": message})
        for child in (self._trainer, self._gateway):
            if child is not None:
                self.agent.unwatch(child.fileno())
                child.kill()
        self._trainer = self._gateway = None
        if self.arena is not None:
            self.agent.unwatch(self._doorbell)
            os.close(self._doorbell)
            self.arena.close()
            self.arena = None
        streams, records, base = (self._in, self.outgoing), self.records, self._base

        def remove() -> None:  # in the thread, which may be using them
            for stream in streams:
                if stream is not None:
                    stream.close()
            records.close()
            shutil.rmtree(base, ignore_errors=True)

        self.agent.background(remove, lambda: None)

    def _post(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if self._channel is None:
            return
        try:
            self._channel.post(message, fds)
        except ChannelClosed:
            self._channel = None


def _whole(message: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """A whole number of a training program's message.

    Raises:
        JobFailed: it is none, or out of range.
    """
    value = message[key]
    if type(value) is not int or not least <= value <= most:
        raise JobFailed(
            f"the training program says {key} {value!r}, not a number from {least} to {most}"
        )
    return value


def sweep(parent: Path) -> None:
    """Remove the working folders of agents that were killed."""
    for folder in parent.glob("nicps-*-*"):
        pid = folder.name.split("-")[1]
        ours = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        if ours and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def working_folder(parent: Path) -> Path:
    """A new folder that only root can change and everybody can enter.

    Raises:
        OSError: the disk is full, or there is no such parent.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"nicps-{os.getpid()}-", dir=parent))
    folder.chmod(0o755)
    return folder


def new_job_id(name: str) -> str:
    """A run's name: time and job."""
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{os.urandom(2).hex()}"
