# SPDX-License-Identifier: Apache-2.0
"""The lead decides, everybody prepares (R5 to R7, R14): one member's part in it."""

from __future__ import annotations

from nicps import wire
from nicps.protocol.actions import (
    PhaseAgreed,
    Send,
)
from nicps.protocol.decision import Ballot, acknowledgement
from nicps.protocol.host import Heard, Host, NodeState
from nicps.protocol.phase import ROUND_KINDS, Phase


class Deciding(Host):
    """Decisions: heard, waited for their turn, prepared, agreed on."""

    def _on_decision(self, now: float, frame: wire.Frame) -> None:
        body, header = frame.body, frame.header
        assert isinstance(body, wire.Decision)
        if header.sender != self.view.lead:
            return
        if body.number > self._decided:
            phase = Phase.unpack(body, frame.tail, len(self.members))  # before anything changes
            self._decided = body.number
            self._acked = (body.number, False, b"")
            self._acknowledge()
            self._hear(now, Heard(phase, header.round))
        else:
            self._acknowledge()

    def _hear(self, now: float, heard: Heard) -> None:
        self._heard = now
        for ring in (self.ring, self._next_ring):
            if ring is not None:  # the phase to come may be in force already, though not here
                ring.freeze()
        self._waiting = heard

    def _acknowledge(self) -> None:
        number, prepared, answer = self._acked
        frame = acknowledgement(self.header(0, self.open_round), number, prepared, answer)
        self._actions.append(Send(frame))

    def _tick_silent_voters(self, now: float) -> None:
        """A member does not answer a decision: go on without it; if it was the stop itself, stop without it."""
        ballot = self._ballot
        assert ballot is not None
        if self._balloted is not None and self._balloted.kind is wire.PhaseKind.STOP:
            silent = ballot.silent(now, self.timings.stop_s)
            if silent:
                ballot.answers.setdefault(silent, b"")
            return
        silent = ballot.silent(now, max(4 * self.timings.silence_s, self.patience.seconds))
        if silent and silent != self.number and self._succession is not None:
            self._succession.suspect(now, silent)

    def _reached(self, waiting: Heard) -> bool:
        """What was committed before the decision must be committed here too."""
        if waiting.phase.kind is wire.PhaseKind.STOP or self.ring is None:
            return True
        return self.ring.round >= waiting.round

    def _agreed(self, now: float, ballot: Ballot) -> None:
        phase = self._balloted
        assert phase is not None and phase.number == ballot.number
        self._actions.append(PhaseAgreed(phase, dict(ballot.answers)))
        if phase.kind is wire.PhaseKind.STOP:
            self._stand_by(phase.ending)
        elif phase.kind in ROUND_KINDS:
            self._enter_next()
            self.ring.create(now)  # type: ignore[union-attr]

    # ---- who must be heard, and who says so

    @property
    def _waits_for_lead(self) -> bool:
        """Between phases the lead must be heard; in a ring, whoever has the token (`Ring`)."""
        return (
            self.state is NodeState.MEMBER
            and not self.leads
            and (self.ring is None or self.ring.frozen)
            and not self.changing
        )

    def _lead_silent_at(self) -> float:
        rank = self.view.rank_after(self.view.lead, self.number)
        return self._heard + 2 * rank * self.patience.seconds

    @property
    def _beacons(self) -> bool:
        """Between phases the lead lets itself be heard."""
        return self.leads and (self.ring is None or self.ring.frozen) and not self.changing
