# SPDX-License-Identifier: Apache-2.0
"""Makes members unequal that share processors: a micro-batch lasts a set time, by sleeping."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Stretches micro-batches of one member.

    With `seconds` every micro-batch lasts at least `seconds * factor`; without, it lasts `factor`
    times as long as it took. `warn` gets a line, once, when the computing itself takes longer.
    """

    def __init__(
        self,
        seconds: float,
        factor: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        warn: Callable[[str], None],
    ) -> None:
        self._due = seconds * factor
        self._factor = factor
        self._clock = clock
        self._sleep = sleep
        self._warn = warn
        self._warned = False
        self._warm = False

    def keep(self, begun: float) -> None:
        """Sleep for what is left of the micro-batch that began at `begun`."""
        took = self._clock() - begun
        if self._due:
            self._check(took)
            left = self._due - took
        else:
            left = took * (self._factor - 1)
        self._warm = True
        if left > 0:
            self._sleep(left)

    def _check(self, took: float) -> None:
        # The first one of all is slow everywhere: PyTorch sets itself up in it.
        if took > self._due and self._warm and not self._warned:
            self._warned = True
            self._warn(
                f"a micro-batch took {took * 1000:.1f} ms to compute, more than "
                f"the {self._due * 1000:.1f} ms that it is set to last"
            )
