# SPDX-License-Identifier: Apache-2.0
"""What a step's exchange does for a member's training loop, whichever way the gradient goes (`trainer.exchange`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nicps.client import Commit, Phase

if TYPE_CHECKING:
    from trainer.flat import F32


class Exchanged(NamedTuple):
    """A step's sum is there. `own`: samples that this member has contributed; `contribute_s`: converting took so long.

    `committed`: on the clock. `divided`: the sum is by the samples already.
    """

    commit: Commit
    own: int
    contribute_s: float
    committed: float
    divided: bool = False


class Exchanger(Protocol):
    """Attributes: `busy`, the session is another thread's: no message may be sent."""

    @property
    def busy(self) -> bool:
        """As above."""

    def ready(self, digest: str) -> None:
        """The model is built; `digest` as for `Session.ready`."""

    def begin(self, phase: Phase, round_: int) -> None:
        """The backward pass of a step's last micro-batch is computed next."""

    def exchange(self, phase: Phase, round_: int, samples: int, out: F32) -> Exchanged | None:
        """Read the sum of all members' gradients into `out`, float32 (lanes,); None: the phase has ended.

        Raises:
            NonFinite: this member's gradient is not finite there.
        """

    def aside(self, work: Callable[[], None]) -> None:
        """Do something that the agent asks for while this member waits; nothing is computed meanwhile."""

    def give_up(self) -> None:
        """This member fails."""
