# SPDX-License-Identifier: Apache-2.0
"""Systems S and B: servers hold the parameters, and workers push their optimizers' steps (rules S1 to S5, B3 and B4,
docs/servers.md).

    worker   pull -> compute -> push weights - pulled, with the version pulled (S1) -> pull ...
             a synchronisation is due -> its step is averaged with those of all others (S4) -> commit -> pull -> digest
    in B     each step is averaged
    ahead    the next step is computed while its parameters arrive (`trainer.partnered`): after a push, and in B
    server   the lead: commit -> pull; any other: pull before a test, a hand-out or the end

What a worker pushes is counted 1 / staleness by the servers (S2, S3). After each synchronisation all workers hold the
same parameters, bit for bit, and these are what is tested and saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from nicps import client
from nicps.client import Commit, Phase, Session
from nicps.errors import NonFinite, TooLarge
from trainer.decisions import Decisions
from trainer.errors import JobError
from trainer.journal import Journal
from trainer.share import Share

if TYPE_CHECKING:
    from trainer.partnered import Ahead
    from trainer.training import Training


@dataclass(slots=True)
class _Round:
    """What a member has done in a round that it began at `began`.

    `start`, `offered`: when its last step was begun, and computed. `version`: as its last push has been told.
    """

    began: float
    start: float
    offered: float
    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    version: int = 0

    @classmethod
    def begin(cls, now: float) -> Self:
        """Nothing is done yet."""
        return cls(now, now, now)


class Served:
    """One member's rounds of training. It is a worker where the phase gives it a share, and else a server."""

    def __init__(
        self,
        session: Session,
        training: Training,
        share: Share,
        journal: Journal,
        decisions: Decisions,
        clock: Callable[[], float],
        make_ahead: Callable[[Callable[[], client.Served]], Ahead] | None = None,
    ) -> None:
        """Nothing is pulled yet.

        Args:
            make_ahead: makes what computes steps while their parameters arrive, with what gives the servers.
        """
        self._session, self._training, self._model = session, training, training.model
        self._share, self._journal, self._decisions = share, journal, decisions
        self._settings, self._clock = training.job.settings, clock
        channels = self._settings.priorities
        self._channels = {"channels": channels} if channels else {}  # in each row
        self._phase = Phase("none", 0, 0, ())
        self._worked = training.state.round  # shares so far: where this worker is in the data
        self._fresh = True  # the weights are those that were handed out, or another member's
        self._moved = False  # they are not those of the last commit
        self._behind = 0  # the round whose commit has been heard of, and not been pulled
        self._untold = False  # it was pulled in a later phase, and the others wait to hear that
        self._pulled = False  # all parameters, since then: there is something to go back to
        self._ahead_s = 0.0  # of computing in the last pull
        self._ahead = make_ahead(lambda: self._servers) if make_ahead is not None else None

    @property
    def _servers(self) -> client.Served:
        served = self._session.served
        if served is None:
            raise JobError(
                f"system={self._settings.system}: this host's agent has no parameter servers; "
                "install the same version of nicps on all hosts"
            )
        return served

    def ready(self, digest: str) -> None:
        """The model is built; `digest` as for `Session.ready`."""
        self._session.ready(self._model.lanes, digest)

    def loaded(self) -> None:
        """Another member's state was taken over (R20)."""
        self._worked = self._training.state.round
        self._fresh, self._moved, self._behind, self._pulled = True, False, 0, False
        self._untold = False
        self._decisions.untested = False  # as far as this member knows

    def catch_up(self) -> None:
        """Take the state of the last commit, as it may be the servers' only, before it is tested or saved."""
        if not self._behind:
            return
        if self._pull(self._behind + 1):
            self._note_commit()
            self._untold = True
        else:
            self._go_back()
            self._journal.warn(
                f"the state after round {self._behind} has not come: an older one is tested, or saved"
            )

    def keep(self, save: Callable[[], None]) -> None:
        """R18: save the state of the last commit while this member waits. A step that it has given needs no weights."""
        if self._behind:
            why = f"the state after round {self._behind} has not been pulled here"
            self._session.checkpoint(self._training.state.round, why)
            return
        self._go_back()
        save()

    def train(self, phase: Phase) -> None:
        """Rounds until the next decision."""
        self._phase = phase
        try:
            self._begin()
            if self._share.place.share:
                self._work(phase.first_round)
            else:
                self._serve(phase.first_round)
        except TooLarge as error:
            name, index = self._model.place_of(error.index)
            told = TooLarge(index, error.value, error.what)
            raise JobError(f"{name}: {told}; a smaller learning rate may help") from None

    def _begin(self) -> None:
        """The servers may ask for what they begin with."""
        if self._fresh:
            self._note_commit()
            self._fresh = False
        elif self._moved:
            self._go_back()  # a server that takes another one's place begins with the last commit
        self._servers.fill(self._model.weights)

    # ---- a worker

    def _work(self, round_: int) -> None:
        """Pull, and train on from there (S1)."""
        if self._ahead is not None:
            self._ahead.enter()
        if not self._pull(round_, self._ahead if self._pulled else None):
            self._go_back()
            return
        if self._behind:  # this is the nearest to that commit: nobody pushes before all have it
            self._note_commit()
            self._untold = True
        if self._untold:
            self._servers.caught_up(round_ - 1)
            self._untold = False
        while round_:
            round_ = self._round(round_)

    def _round(self, round_: int) -> int:
        """From one synchronisation to the next; the round after it, or 0 when the phase is over.

        A round that is left in the middle is dropped: this worker goes back to the last commit.
        """
        own = _Round.begin(self._clock())
        while not isinstance(ended := self._step(round_, own), Commit):
            if not ended:
                self._go_back()
                return 0
        return self._read(ended, own)

    def _step(self, round_: int, own: _Round) -> Commit | bool:
        """Compute a step and push it (S1), or give it to the synchronisation that is due (S4).

        Returns:
            The commit, or whether the phase goes on.
        """
        training, start = self._training, self._clock()
        own.start = own.offered = start
        if self._is_barrier(own):
            self._servers.skip(round_)
            return self._waited(round_) or False
        of = round_, self._worked
        computed = self._ahead.take(*of) if self._ahead is not None else None
        samples, loss_sum = computed or self._share.compute(*of)
        if samples < self._share.place.share:  # called away
            return self._waited(round_) or False
        state = training.state
        training.schedule(state.round + (state.steps + own.version) // self._workers)
        before_test = self._decisions.untested and not own.steps
        take_back = training.keep_optimizer() if before_test else None
        training.update(self._share.finish(samples), samples)
        self._moved = True
        own.offered = offered = self._clock()
        try:
            self._servers.step(round_, self._model.weights, own.steps + 1)
        except NonFinite as error:
            raise self._not_finite(round_, error) from None
        stepped = self._servers.wait(round_)
        if stepped is None:
            if take_back is not None:  # only some workers have made this step before the test
                take_back()
            return False
        self._worked += 1
        own.steps, own.samples = own.steps + 1, own.samples + samples
        own.loss_sum += loss_sum
        training.state = replace(state, loss=loss_sum / samples)
        if isinstance(stepped, Commit):
            return stepped
        own.version, pushed = stepped.version, self._clock()
        pulled = self._is_barrier(own) or self._pull(round_, self._ahead)
        end = self._clock()
        self._journal.round(
            {
                "phase": "push",
                "round": round_,
                "loss": loss_sum / samples,
                "own_samples": samples,
                "version": stepped.version,
                "staleness": list(stepped.staleness),
                "weights_sha256": "",
                "seconds": end - start,
                "seconds_compute": offered - start + self._ahead_s,
                "seconds_wait": 0.0,
                "seconds_network": end - offered - self._ahead_s,
                "t_start": start,
                "t_offer": offered,
                "t_commit": pushed,
                "t_end": end,
                **self._channels,
            }
        )
        return pulled

    def _is_barrier(self, own: _Round) -> bool:
        """Whether no synchronisation is due ever (T = 0), and a test is: after as many pushes as come between two."""
        return not self._settings.sync_every and own.version >= self._pushes_to_test()

    def _pushes_to_test(self) -> int:
        """Pushes of all workers from the last commit to the next test."""
        training = self._training
        every, state = self._settings.rounds_between_tests(training.records), training.state
        rounds = every - state.round % every
        if training.rounds is not None:
            rounds = max(1, min(rounds, training.rounds - state.round))
        return rounds * self._workers - state.steps

    def _read(self, commit: Commit, own: _Round) -> int:
        """A synchronisation is whole: pull what it comes to, tell the digest, decide what comes next."""
        committed = self._clock()
        test = self._count(commit, committed)
        # All workers wait until each has read a synchronisation: where steps are pushed, none is computed before.
        ahead = self._ahead if self._settings.packed and not test else None
        if not self._pull(commit.round + 1, ahead):
            return 0
        self._note_commit()
        self._session.applied(commit, self._training.digest())
        return self._end(commit, test, own, committed)

    # ---- a server

    def _serve(self, round_: int) -> None:
        """The kernel serves. The program needs the parameters only for a test or a state file: the lead pulls them
        before it decides on either, any other server in `catch_up`.
        """
        # It steps the scheduler for the state that it saves, and never the optimizer.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")
        while round_:
            own = _Round.begin(self._clock())
            commit = self._waited(round_)
            if commit is None:
                return
            committed = self._clock()
            test = self._count(commit, committed)
            if self._session.lead:
                if not self._pull(commit.round + 1):
                    return
                self._note_commit()
            self._session.applied(commit)
            round_ = self._end(commit, test, own, committed)

    # ---- both

    def _waited(self, round_: int) -> Commit | None:
        """The round's commit, of which this member has no step; None if the phase ends before."""
        ended = self._servers.wait(round_)
        assert not isinstance(ended, client.Stepped), "a step has come of no step"
        return ended

    def _pull(self, round_: int, ahead: Ahead | None = None) -> bool:
        """S1: all parameters; False if another phase begins before they are here.

        Args:
            ahead: computes a step meanwhile, if the answers to the last one have not brought everything.
        """
        servers = self._servers
        servers.pull(round_)
        self._ahead_s = 0.0
        if ahead is not None and not servers.here(0, servers.fragments):
            self._moved = True
            ahead.compute(round_, self._worked)
            self._ahead_s = ahead.computed_s
        if not servers.wait_pulled(round_):
            return False
        servers.read(self._model.weights)
        self._model.adopt()
        self._moved = True
        self._pulled |= bool(self._share.place.share)
        return True

    def _note_commit(self) -> None:
        """The weights are those of the last commit."""
        self._moved, self._behind = False, 0
        if self._share.place.share:
            self._servers.keep_commit(self._model.weights)

    def _go_back(self) -> None:
        """To the last commit; what a forward pass has moved goes back, too."""
        if self._moved:
            self._servers.take_back(self._model.weights)
            self._model.adopt()
        self._model.restore()
        self._moved = False

    def _count(self, commit: Commit, now: float) -> bool:
        """As many steps as there are workers are a round (docs/servers.md, "Counting"); whether a test is due (R15).

        One that was due before is due now, too: where a server is lost, another one comes first.
        """
        training, before = self._training, self._training.state.round
        self._behind = commit.round
        workers = len(commit.counted) or self._workers
        rounds, steps = divmod(training.state.steps + self._steps_of(commit), workers)
        training.count(rounds)
        training.state = replace(training.state, steps=steps, seconds=self._journal.seconds(now))
        overdue = self._decisions.untested
        return self._decisions.is_test_due(before) or overdue

    def _steps_of(self, commit: Commit) -> int:
        """Of all workers in a round: pushes, and those that are averaged. A barrier counts what it is due after."""
        return sum(commit.counted.values()) or self._pushes_to_test()

    @property
    def _workers(self) -> int:
        """How many are left."""
        return sum(1 for number in self._session.live if self._phase.share_of(number))

    def _end(self, commit: Commit, test: bool, own: _Round, committed: float) -> int:
        """Decide what comes next, and write down what was; a server that has not pulled has no weights to speak of.

        Returns:
            The next round, or 0 if the lead has something else in mind.
        """
        phase, read = self._phase, self._clock()
        goes_on = self._decisions.after_training(commit, test, read - own.began)
        counted = {
            str(number): steps * phase.share_of(number)
            for number, steps in sorted(commit.counted.items())
        }
        samples, end = sum(counted.values()), self._clock()
        if not self._behind:
            self._journal.round(
                {
                    "phase": "train",
                    "round": commit.round,
                    "loss": own.loss_sum / own.samples if own.samples else None,
                    "samples": samples,
                    "own_samples": own.samples,
                    "counted": counted,
                    "clipped": self._share.clipped,
                    "weights_sha256": self._training.hash_weights(commit.round, last=not goes_on),
                    "seconds_compute": (own.offered - own.start) + self._ahead_s + (end - read),
                    "seconds_wait": committed - own.offered,
                    "seconds_network": read - committed - self._ahead_s,
                    "t_start": own.start,
                    "t_offer": own.offered,
                    "t_commit": committed,
                    "t_end": end,
                    **self._channels,
                },
                step=bool(own.steps),
            )
        self._journal.report(commit.round, samples, end - own.began, self._share.clipped)
        self._decisions.committed(commit, end)
        return commit.round + 1 if goes_on else 0

    def _not_finite(self, round_: int, error: NonFinite) -> JobError:
        model, index = self._model, error.index
        return JobError(
            f"round {round_}: the step of {model.name_at(index)} is not finite "
            f"({model.weights[index]}); a smaller learning rate may help"
        )
