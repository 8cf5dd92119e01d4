# SPDX-License-Identifier: Apache-2.0
"""A member's share of a batch: which samples these are, and its gradient of them (R6, R8, R13, R21)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nicps.client import Phase, Session
from trainer.errors import JobError
from trainer.pace import Pace
from trainer.records import Part, Place, Records

if TYPE_CHECKING:
    from trainer.flat import F32
    from trainer.training import Training

MASK = 2**63 - 1


class Share:
    """One member's.

    Attributes: `place`, among those that train; `clipped`, how many of its gradients were too long so far.
    """

    def __init__(
        self,
        session: Session,
        training: Training,
        train: Records,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """It has no place yet.

        Args:
            train: the training records that this host has: all of them, or with `redeal=False` its own part.
        """
        self._session, self._training, self._train = session, training, train
        self._settings, self._clock = training.job.settings, clock
        slow = self._settings.slow.get(session.name, 1.0)
        self._pace = Pace(self._settings.microbatch_seconds, slow, clock, sleep, warn)
        self.place = Place(0, 0, 0)
        self._part = Part(train, self.place, None, 0)
        self.clipped = 0

    def enter(self, phase: Phase) -> None:
        """A phase of training begins: train on the part of the data that is now this member's (R6, R21).

        Raises:
            JobError: it has no samples.
        """
        number = self._session.number
        place = Place.of(number, phase.shares)
        if place != self.place:
            self.place = place
            self._part = self.part_of(self._train, place)
        if place.share and not len(self._part):
            raise JobError(
                f"member {number} has no training samples: the {self._training.records} in "
                f"the job's data are fewer than the {place.count} members"
            )

    def part_of(self, records: Records, place: Place) -> Part:
        """What a member in that place works of a data set."""
        number = None if self._settings.redeal else self._session.number
        return Part(records, place, number, self._settings.seed)

    def compute(
        self,
        round_: int,
        step: int,
        between: Callable[[bool], None] = lambda last: None,
        stop: Callable[[], bool] = lambda: False,
        *,
        ahead: bool = False,
    ) -> tuple[int, float]:
        """Work the share in micro-batches (R13): samples done, and the sum of their losses.

        Args:
            step: how many shares were worked before; it says which samples come, and which random numbers.
            between: is called between the forward and the backward pass of each micro-batch; whether it is the last.
            stop: whether this host is called away.
            ahead: the round before is not settled; `between` settles it.
        """
        session, training, parts = self._session, self._training, self._settings.micro_batches
        share = self.place.share
        training.begin(_mix(self._settings.seed, session.number, step), ahead=ahead)
        indices = self._part.indices(step * share, share)
        done, loss_sum = 0, 0.0
        for part in range(1, parts + 1):
            begun = self._clock()
            end = share * part // parts
            if end == done:
                continue
            if session.closed(round_):  # the others need no more: this host may catch up with them
                break
            batch = self._part.take(indices[done:end])
            loss_sum += training.compute(batch, end - done, partial(between, end == share))
            done = end
            self._pace.keep(begun)
            if stop():
                break
            session.progress(round_, done)
            # Enough for the quorum: what the others have ready and counted, and this (R13).
            if self._settings.quorum < 1 and 0 < session.need(round_) <= done:
                break
        return done, loss_sum

    def finish(self, samples: int) -> F32:
        """The gradient of so many samples, clipped if the job says so."""
        model, most = self._training.model, self._settings.clip
        vector = model.finish(samples)
        if most is not None:
            self.clipped += model.clip(samples, most)
        return vector


def _mix(*parts: int) -> int:
    """A seed out of several."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) & MASK
