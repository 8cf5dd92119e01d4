# SPDX-License-Identifier: Apache-2.0
"""Whether all members hold the same weights (R19): they report a digest of their state with each round."""

from __future__ import annotations

from nicps.protocol.actions import Action, Differs
from nicps.protocol.phase import Phase
from nicps.protocol.token import TokenState
from nicps.protocol.view import View

#: A member is two rounds behind at most: there are two banks of sums.
_ROUNDS_KEPT = 4


class Digests:
    """The digests of the last rounds, round by round: a slow member reports each later than the others."""

    def __init__(self, phase: Phase, view: View) -> None:
        self._phase = phase
        self._view = view
        self._reported: dict[int, dict[int, int]] = {}  # round -> member -> digest
        #: In a step of several rounds only the last one has a digest.
        self._kept = max(_ROUNDS_KEPT, 2 * phase.rounds_per_step() + 2)
        self._compared = 0  # latest round whose digests have been found to differ

    def compare(self, token: TokenState, open_round: int) -> list[Action]:
        """Take note of what the token's entries report; `Differs`, once it is known who differs."""
        oldest, fresh, lines = open_round - self._kept, set(), token.lines
        for k in self._view.order:
            line = lines[k - 1]
            digest, read = line.digest, line.read
            if digest and oldest <= read < open_round:
                reported = self._reported.get(read)
                if reported is None:
                    reported = self._reported[read] = {}
                if reported.get(k) != digest:
                    reported[k] = digest
                    fresh.add(read)
        found: list[Action] = []
        for round_ in sorted(fresh):
            found += self._judge(round_, self._reported[round_])
        if len(self._reported) > self._kept:
            self._reported = {r: d for r, d in self._reported.items() if r >= oldest}
        return found

    def _judge(self, round_: int, reported: dict[int, int]) -> list[Action]:
        """Who differs is known once most have reported the same, or all have reported."""
        digests = sorted(reported.values())
        if round_ <= self._compared or digests[0] == digests[-1]:
            return []
        voters = reported.keys() | {k for k in self._view.order if self._phase.shares[k - 1]}
        most = max(digests, key=digests.count)
        agreed = 2 * digests.count(most) > len(voters)
        if not agreed and len(reported) < len(voters):
            return []
        self._compared = round_
        different = frozenset(k for k in reported if reported[k] != most)
        return [Differs(round_, different if agreed else frozenset())]
