# SPDX-License-Identifier: Apache-2.0
"""A training program's side of the agent: NumPy vectors in, exact sums out.

    session = Session.attach()                  # the agent's socket is in NICPS_SOCKET
    session.ready(lanes=model_size, digest=...)
    while (phase := session.next_phase()).kind != "end":
        ...                                     # docs/jobs.md; trainer/loop.py is the PyTorch program

Gradients do not pass through the socket: they are converted into memory that the agent sends from, while it sends,
and sums are read where the kernel adds them up. Rules R8, R11 to R15.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from nicps.errors import JobAborted, LeftOut, NetworkProblem, TooLarge
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.channel import Channel, ChannelClosed, agent_address
from nicps.session.conversation import Conversation
from nicps.session.decisions import Decisions
from nicps.session.fields import encode
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.memory import Memory, is_whole
from nicps.session.messages import Attach, Error
from nicps.session.phases import Commit, Phase
from nicps.session.planned import Channels
from nicps.session.reducers import Standing, prepare
from nicps.session.residual_file import ResidualFile
from nicps.session.served import Served
from nicps.session.served_form import NearLimit, Pulled, Serves, Stepped, second_begins
from nicps.session.sized import Round, Vector
from nicps.session.vector_rounds import VectorRounds, check_out

__all__ = [
    "F32",
    "Commit",
    "JobAborted",
    "LeftOut",
    "Phase",
    "Served",
    "Session",
    "Stepped",
    "second_begins",
]


class Session:
    """A member's training program, attached to its agent. Not for use from several threads.

    Attributes: `number`, this member's; `view` and `live` (numbers of the members in it), which change while messages
    are waited for, as `lead` does; `settings` and `workdir` of the job.
    """

    def __init__(self, channel: Channel, welcome: shared_form.Welcome) -> None:
        self.number = welcome.number
        self.members = len(welcome.members)
        self.name = welcome.name
        self.settings = dict(welcome.settings)
        self.workdir = welcome.workdir
        self.view = welcome.view
        self.live = frozenset(member.number for member in welcome.members)
        self._talk = Conversation(channel, self._note)
        self._send = self._talk.send
        lead, mail = welcome.lead == self.number, self._talk.mail
        self._decisions = Decisions(self._send, lead=lead, holds_commits=lambda: mail.holds_commits)
        self._format = LaneFormat(0, 32)  # of the job's vector
        self._residual: ResidualFile | None = None
        self._memory: Memory | None = None
        self._rounds: VectorRounds | None = None
        self._phase = Phase("none", 0, 0, ())
        #: The rounds of a step, where steps have a plan; each channel may be another thread's.
        self.channels: Channels | None = None
        #: Parameters, from the first training phase on in which members serve them.
        self.served: Served | None = None
        #: Saves the state and calls `checkpoint`, where no majority is left; called while this program waits.
        self.on_keep: Callable[[], None] | None = None
        #: Called with the kind of the next phase, which begins once it has returned.
        self.on_phase: Callable[[str], None] | None = None

    @classmethod
    def attach(cls, socket: str | None = None) -> Self:
        """Connect to the agent.

        Args:
            socket: a path, or `@name` for an abstract address; default: NICPS_SOCKET, or `@nicps`.

        Raises:
            NetworkProblem: no agent listens there, or it expects no training program now.
        """
        channel = Channel.to_agent(agent_address(socket))
        channel.send(encode(Attach(pid=os.getpid())))
        answer = shared_form.FROM_AGENT.decode(channel.recv(timeout_s=30.0)[0])
        if isinstance(answer, Error):
            raise NetworkProblem(answer.message)
        if not isinstance(answer, shared_form.Welcome):
            raise NetworkProblem("the agent expects no training program now")
        return cls(channel, answer)

    @property
    def lead(self) -> bool:
        """Whether this member acts as node 1 (R22)."""
        return self._decisions.lead

    # ---- getting ready

    def ready(
        self,
        lanes: int,
        digest: str,
        *,
        residual: F32 | None = None,
        settle: Callable[[], object] | None = None,
        plan: Sequence[shared_form.ChannelPlan] = (),
    ) -> None:
        """The model is built: `lanes` float32 a round, and a digest that must be the same on all members.

        A job that is resumed goes on with the residual that this host has kept; where it has none that fits, with none.

        Args:
            residual: of a job whose steps take several rounds (`nicps.steps`): float32 (n,), which the program writes.
                In a job that is resumed it gets what this host has kept.
            settle: called before that is read or replaced, also in the middle of a step: brings it up to date.
            plan: of a job whose steps have one (`priorities`), with a residual: the first one. `lanes` are those of the
                largest round of channel 0 then.

        Raises:
            JobAborted: another member's model differs, or the job was stopped.
            JobFailed: the job's steps take several rounds, and the program's do not, or the other way round.
        """
        several, planned = residual is not None, bool(plan)
        whole = is_whole(self.settings, several=several, planned=planned)
        bits = int(str(self.settings.get("lane", "i16")).removeprefix("i"))
        self._format = format = LaneFormat(lanes, bits)
        kept = lanes if residual is None else len(residual)
        prepare(format, kept, self.settings)
        self._send(shared_form.Ready(lanes, digest, tuple(plan)))
        message, (arena, doorbell, *files) = self._talk.receive(shared_form.Arena)
        left = Residual(format, residual)
        whose = Arena(arena, message.fragments), doorbell, self.number
        self._memory = Memory(format, left, *whose, whole=whole)
        self._rounds = VectorRounds(self._memory, self._talk, lanes)
        if planned:
            shared = self.number, self._memory.rounds, self._talk.mail, self._send
            self.channels = Channels(*shared, lambda: self._standing.due, self._forget_state)
        self._residual = ResidualFile(left, kept, self.workdir, settle)
        if message.state and (dropped := self._residual.take(files[0], message.state)):
            self._send(shared_form.Residual(dropped))

    def next_phase(self) -> Phase:
        """Wait for node 1's next decision (R7, R14, R15, R20).

        Raises:
            JobAborted: the job was stopped.
        """
        phase = self._talk.next_phase()
        about = phase.number, phase.shares, phase.exchange, phase.channels
        self._phase = Phase(phase.kind, phase.first_round, *about)
        if self._memory is not None:
            self._memory.enter(phase)
        if self._rounds is not None:
            self._rounds.begin()
        self._enter_view(phase)
        if phase.kind == "end" and self.settings.get("checkpoint_s", True):
            self._keep_residual()
        self._decisions.enter_phase(phase.kind, lead=phase.lead == self.number)
        fills = self.served is not None and self.served.waits_to_fill(phase.number)
        if self.on_phase is not None:
            self.on_phase(phase.kind)
        if not fills:
            self._send(shared_form.Prepared(phase.number))
        self._talk.mail.begin(planned=bool(phase.channels))
        return self._phase

    def saved(self, number: int, round_: int, digest: str, error: str = "") -> None:
        """The state file is complete, with the state after `round_` trained rounds; or `error` says why it is not."""
        self._send(shared_form.Saved(number, round_, digest, error))

    def loaded(self, number: int, digest: str) -> None:
        """The phase's state file has been read; `digest` is of the state that this member has now."""
        assert self._residual is not None, "call ready() first"
        self._residual.forget(digest)
        self._shared().forget()
        self._decisions.forget()
        self._send(shared_form.Loaded(number, digest))

    def alive(self) -> None:
        """Still at work, where there is nothing else to say for longer than the job's `stall_s`."""
        self._send(shared_form.Alive())

    def checkpoint(self, round_: int, error: str = "") -> None:
        """The checkpoint was written anew: the state after `round_` trained rounds; or `error` says why it was not.

        The lead's program writes one where `decide` has asked for it and the commit says so: then all members keep
        their residuals, too.
        """
        self._keep_residual()
        self._send(shared_form.Checkpoint(round_, error))

    # ---- a training round

    def need(self, round_: int) -> int:
        """Samples that are still enough to reach the quorum (R13); a large number before anybody contributed."""
        of_round, samples = self._shared().arena.need
        return samples if of_round == round_ else 1 << 40

    def closed(self, round_: int) -> bool:
        """The round's list is closed without us, or the phase is over: drop the rest of the batch."""
        arena = self._shared().arena
        return arena.closed >= round_ or arena.phase > self._phase.number

    def progress(self, round_: int, samples: int) -> None:
        """A micro-batch is done; `samples` of the round so far."""
        several = shared_form.has_steps(self.settings)  # no samples are counted in a round then
        self._send(shared_form.Alive() if several else shared_form.Progress(round_, samples))
        self._talk.note_urgent()

    def contribute(self, round_: int, vector: F32, samples: int, *, finite: bool = True) -> None:
        """Offer this member's gradient, the sum over `samples`; it is being sent while it is converted.

        Args:
            vector: float32 (lanes,), not changed. Nobody may change it until the round's `sum` has been read, or,
                where none is, until the round is `applied`.
            finite: refuse NaN and infinity also where they could be sent, which is in stripes: the sum of a fragment
                with one of them in it is NaN.

        Raises:
            NonFinite: the vector holds NaN or infinity; nothing was offered.
        """
        self._of_vector().contribute(round_, vector, samples, finite=finite)

    def wait_commit(self, round_: int, out: F32 | None = None) -> Commit | None:
        """Wait until the round is committed; None if the phase ended before: nothing of the round counts.

        Args:
            out: float32 (lanes,) that will be given to `sum`: what has come from all members is summed into it
                while the rest is on its way.

        Raises:
            JobAborted: the job was stopped.
            JobFailed: `out` is memory of the vector that was offered.
        """
        return self._of_vector().wait_commit(round_, out)

    def exchange(self, round_: int, vector: Vector, call: int) -> shared_form.Committed | None:
        """Offer a vector of any size to a round, and give it the sums, if all members have called the same.

        None: the phase ended before, and nothing of the round counts. `nicps.steps` makes steps of such rounds.

        Args:
            call: a checksum of what is called.
        """
        rounds = self._shared().rounds.of(0)
        if self._talk.next is None and not self.closed(round_):
            self._send(rounds.begin(round_, vector, call))
            rounds.convert(round_, vector, self.live)
        message = self._talk.await_round(round_, shared_form.Committed)
        if message is not None and Round(round_, dict(message.counted)).agrees:
            if vector.feedback:
                self._forget_state()
            rounds.settle(message, vector)
        return message

    @property
    def saturated(self) -> int:
        """Lanes so far that were too large for the step that a switch needs of all; the rest is in the residual."""
        return self._memory.adding.offers.saturated if self._memory is not None else 0

    def sending_since(self, round_: int) -> float:
        """When this member's contribution began to go out, on CLOCK_MONOTONIC; 0 if it has not."""
        return self._shared().arena.sending_since(round_)

    def sum(self, commit: Commit, out: F32 | None = None) -> F32:
        """The exact sum over the counted gradients, own part included, as float32 (lanes,); zeros if none counted.

        It may be read as often as one likes, until the round is `applied`.

        Raises:
            JobFailed: `out` is memory of the vector that was offered.
        """
        return self._of_vector().sum(commit, out)

    def applied(self, commit: Commit, digest: str = "") -> None:
        """The sum has been read and applied; the accumulators are free for another round.

        Args:
            digest: of the state after it, which must be the same on all members; "" where there is no state.
        """
        self._shared().finish(commit)
        if self._residual is not None:
            self._residual.applied(commit.round, digest)
        self._send(shared_form.Read(commit.round, digest))
        if commit.checkpoint:
            self._keep_residual()

    def all_reduce(self, round_: int, vector: F32, out: F32 | None = None) -> F32:
        """Contribute with one sample, wait for everybody, and read the sum.

        If the members change meanwhile, the round is run again with who is left. Where a switch adds, numbers that
        are too large for the round's step are cut off (`saturated`). In stripes no number is too large, and NaN or
        infinity makes the sum of its fragment NaN.

        Raises:
            JobAborted: the job was stopped, or something else than training comes next.
            NonFinite: the vector holds NaN or infinity, and the exchange is not stripes.
            JobFailed: `out` is memory of `vector`.
            LeftOut: there is no sum, for nobody. A member's numbers were too large for the round's unit, as they
                mostly are in the first round where a switch adds; or the round is not run again, as the switch has
                been given up. All offer again in `next_round`; the lead decides "continue" before that, as after
                every round. Whoever comes too late for a quorum below 1 is left out alone.
        """
        out = np.empty_like(vector) if out is None else out
        check_out(round_, vector, out)
        self.contribute(round_, vector, 1, finite=False)
        while (commit := self.wait_commit(round_, out)) is None:
            phase = self.next_phase()
            if phase.kind != "train":
                raise JobAborted(f"round {round_} is not run again: {phase.kind} comes next")
            if phase.first_round != round_:
                raise LeftOut(f"round {round_} is not run again", phase.first_round)
            self.contribute(round_, vector, 1, finite=False)
        if commit.left_out or self.number not in commit.counted:
            self.applied(commit)
            why = "has numbers too large for its unit" if commit.left_out else "closed without us"
            raise LeftOut(f"round {round_} {why}", round_ + 1)
        out = self.sum(commit, out)
        self.applied(commit)
        return out

    # ---- a test round, the lead's decisions, and messages

    def tally(self, round_: int, succeeded: int, failed: int) -> tuple[int, int] | None:
        """R15: the successes and failures of all members; None if the phase ended before they were known.

        Raises:
            JobAborted: the job was stopped.
        """
        adding = self._shared().adding
        if self._phase.share_of(self.number):
            adding.offers.begin(round_)
            self._send(shared_form.Offer(round_, 1, None, False))
            adding.offers.put(round_, succeeded, failed)
        commit = self.wait_commit(round_)
        if commit is None:
            return None
        total = np.zeros(2, np.int64)
        if self.number in commit.counted:
            total += (succeeded, failed)
        bank = adding.sums.bank(round_, commit.counted)
        if bank is not None:
            total += bank[0, :2]
        self.applied(commit)
        return int(total[0]), int(total[1])

    def decide(
        self,
        round_: int,
        what: str,
        *,
        checkpoint: bool = False,
        plan: Sequence[shared_form.ChannelPlan] = (),
    ) -> bool:
        """What this member would do after a round it has committed: "continue", "test" or "end" (R14); or "more", where
        the round's step goes on. Where steps have a plan, the round is the last one of channel 0 in the step, once all
        of the step is applied; "plan": as "continue", with that plan.

        Every member says so after every round, and only the lead's word goes out (`nicps.session.decisions`).

        Args:
            checkpoint: the lead will write one after the next training round. All members hear of that with the
                round's commit; where that does not say so, the lead asks again.

        Returns:
            Whether the word has gone out: only then another phase comes after "test", "plan" and "end". A member that
            becomes the lead in the middle of the next step goes on with that step.
        """
        decision = shared_form.Decide(round_, what, checkpoint, tuple(plan))
        return self._decisions.decide(decision)

    def report(self, values: Mapping[str, Any]) -> None:
        """Live progress, for whoever watches the job; what is called `warning` is shown as one."""
        self._send(shared_form.Report(values))

    def fail(self, message: str) -> None:
        """The job cannot go on here, in one line; it is stopped everywhere."""
        with contextlib.suppress(ChannelClosed):
            self._send(shared_form.Fail(message))

    def close(self) -> None:
        """Detach from the agent."""
        self._talk.close()

    # ---- inside

    @property
    def _standing(self) -> Standing:
        return Standing(self.number, self.view, self.live, self._phase.shares)

    def _shared(self) -> Memory:
        assert self._memory is not None, "call ready() first"
        return self._memory

    def _of_vector(self) -> VectorRounds:
        assert self._rounds is not None, "call ready() first"
        return self._rounds

    def _forget_state(self) -> None:
        """The residual belongs to no state before the step is applied."""
        if self._residual is not None:
            self._residual.state = ""

    def _note(self, message: shared_form.FromAgent, fds: list[int]) -> None:
        """Note what a message tells."""
        if isinstance(message, shared_form.Abort):
            if message.saved:
                self._keep_residual()
            raise JobAborted(message.message)
        if isinstance(message, shared_form.Keep):
            if self.on_keep is not None:
                self.on_keep()
            else:
                self.checkpoint(0, "the training program cannot save while it waits for the others")
        if self._memory is not None and isinstance(message, shared_form.Phase | shared_form.View):
            if isinstance(message, shared_form.Phase):
                self._memory.drop()
            self._memory.map(message, iter(fds))
        if isinstance(message, Serves) and self.served is None:
            assert self._residual is not None, "call ready() first"
            whose = self._format, self._residual, self.number
            self.served = Served(*whose, self._send, self._talk.await_round, self._talk.glance)
        if isinstance(message, Serves | Pulled) and self.served is not None:
            self.served.map(message, iter(fds))
        if isinstance(message, NearLimit):
            raise TooLarge(message.index, message.value, "a parameter is")
        if isinstance(message, shared_form.View):
            self._enter_view(message)
            self._decisions.enter_view(lead=message.lead == self.number)

    def _keep_residual(self) -> None:
        """Write the residual for `nicps resume`, if the job has one. Where it cannot be written, training goes on."""
        if self._residual is None or not self._residual.changed:
            return
        self._shared().drop()
        error = self._residual.keep()
        with contextlib.suppress(ChannelClosed):  # where the job was stopped
            self._send(shared_form.Residual(error))

    def _enter_view(self, message: shared_form.Phase | shared_form.View) -> None:
        """Another view is in force, or another phase."""
        self.view, self.live = message.view, frozenset(message.live)
        if self._memory is not None:
            self._memory.change_view(self._standing)
