# SPDX-License-Identifier: Apache-2.0
"""How sequences for a Linux switch are written down (tests/vectors/README.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.striped_reference import Piece
from tests.vectors.contributing import GROUP, Contributing, Out, made, rows, spans
from tests.vectors.scenario import NETWORK, ROUND, VIEW


class Switching(Contributing):
    """One sequence for a switch.

    Args:
        name, why, members, left, key: as `Written`.
        width: of a lane, in bits; fragments: of the vector.
        listed: the members of the rounds' list; all that are live unless given.
        config: what differs from the usual configuration (tests/vectors/README.md).
    """

    def __init__(
        self,
        name: str,
        why: str,
        *,
        members: int = 3,
        left: Sequence[int] = (),
        key: bytes | None = None,
        width: int = 8,
        fragments: int = 1,
        listed: int | None = None,
        **config: Any,
    ) -> None:
        usual = {
            "network": NETWORK,
            "everybody": GROUP,
            "enabled": 1,
            "view": VIEW,
            "room": fragments,
            "width": width,
        }
        super().__init__(name, why, members=members, left=left, key=key, usual=usual, config=config)
        live = [number for number in range(1, members + 1) if number not in left]
        all_ = sum(1 << number - 1 for number in live)
        self.begin(width, all_ if listed is None else listed, fragments)

    def ends(
        self,
        *,
        places: Sequence[dict[str, Any]] = (),
        windows: Sequence[tuple[int, int, int]] = (),
        messages: Sequence[dict[str, Any]] = (),
    ) -> Switching:
        """The state at the end.

        Args:
            places: `place`s, two a fragment at the most.
            windows: (sender, highest number believed of its own frames, of its answers).
            messages: to the control process.
        """
        self.end = {
            "places": list(places),
            "windows": rows("sender highest answers", windows),
            "messages": list(messages),
        }
        return self

    def place(
        self,
        seen: Sequence[int],
        units: Sequence[int],
        piece: Piece | None = None,
        **fields: int,
    ) -> dict[str, Any]:
        """One of a fragment's two.

        Args:
            seen: members whose contribution is in.
            units: numbers of units by lane: of what has come, or what the sum has left over.
            piece: the sum, if it is made.
            fields: what differs from the usual ones.
        """
        names = ("index", "members", "fragments", "unit", "number", "behind")
        usual = {"view": VIEW, "round": ROUND} | {name: self.usual[name] for name in names}
        row: dict[str, Any] = usual | fields | {"seen": list(seen), "units": spans(units)}
        if piece is not None:
            row["sum"] = {"exponent": piece.exponent, "lanes": spans(piece.lanes)}
        return row


def sum_made(piece: Piece) -> Out:
    """A sum, to all ports."""
    return made(piece, number=0, behind=0)
