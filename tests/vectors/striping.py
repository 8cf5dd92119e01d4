# SPDX-License-Identifier: Apache-2.0
"""How sequences for one host of a round in stripes are written down (tests/vectors/README.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.striped_reference import Piece
from tests.vectors.contributing import GROUP, Contributing, rows, spans
from tests.vectors.scenario import NETWORK, ROUND, TX, VIEW, mac

BANK = ROUND & 1
#: The number of the conversion that is offered for the open round.
OFFER = 5


class Striped(Contributing):
    """One sequence for host 1, unless `number` says otherwise.

    Args:
        name, why, members, left, key: as `Written`.
        width: of a lane, in bits; fragments: of the vector.
        listed: the members of the round's list; all that are live unless given.
        own: the own lanes of the open round, by fragment.
        sent: of the open round, by aggregator: the fragment to send next.
        config: what differs from the usual configuration (tests/vectors/README.md).
    """

    to_everybody = TX

    def __init__(
        self,
        name: str,
        why: str,
        *,
        members: int = 3,
        left: Sequence[int] = (),
        key: bytes | None = None,
        width: int = 8,
        fragments: int = 3,
        listed: int | None = None,
        own: Mapping[int, Piece] | None = None,
        sent: Mapping[int, int] | None = None,
        **config: Any,
    ) -> None:
        live = [number for number in range(1, members + 1) if number not in left]
        aggregators = config.get("aggregators", live)
        usual = {
            "network": NETWORK,
            "everybody": GROUP,
            "view": VIEW,
            "round": ROUND,
            "round_high": ROUND + 1,
            "number": 1,
            "aggregators": aggregators,
            "aggregators_next": aggregators,
            "width": width,
            "width_next": width,
            "room": fragments,
            "blocks": fragments,
            "clock": 0,
            "switch": 0,
            "offered": [0, OFFER],
            "rest": [[0, 0], [0, 0]],
            "own": owned(own or {}),
            "sent": next_ones(sent or {}),
        }
        super().__init__(name, why, members=members, left=left, key=key, usual=usual, config=config)
        self.number = self.config["number"]
        self.address = mac(self.number)
        all_ = sum(1 << number - 1 for number in live)
        self.begin(width, all_ if listed is None else listed, fragments)

    def sum_(self, say: str, counters: str, piece: Piece, sender: int = 2, **more: Any) -> None:
        """A sum of another host's, to everybody; of fragment 1 unless said otherwise."""
        self.give("sum", say, counters, piece, sender, **{"index": 1} | more)

    def lacking(self, say: str, counters: str, sender: int = 2, **more: Any) -> None:
        """The answer that there is no sum."""
        self.give("lacking", say, counters, self.part(0), sender, **more)

    def convert(
        self,
        say: str,
        own: Mapping[int, Piece],
        *,
        bank: int = BANK,
        conversion: int = OFFER,
        **more: Any,
    ) -> None:
        """The training program writes lanes; `more`: the agent changes the configuration."""
        self.agent(say, own=owned(own, bank, conversion), **more)

    def ends(
        self,
        *,
        sums: Sequence[tuple[Any, ...]] = (),
        places: Sequence[tuple[Any, ...]] = (),
        counts: Sequence[tuple[int, ...]] = ((ROUND, 1),),
        sent: Sequence[tuple[int, ...]] = (),
        windows: Sequence[tuple[int, int, int]] = (),
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Striped:
        """The state at the end.

        Args:
            sums: (fragment, sum, "made" or "taken"), and where they differ from the usual ones, round and view.
            places: (fragment, members whose contribution is in, numbers of units by lane: of what has come, or what the
                sum has left over), and the same.
            counts: (round, sums that are here), and the view.
            sent: (bank, aggregator, round, fragment to send next, sums that come and send nothing).
            windows: (sender, highest number believed of its own frames, of its answers).
            messages: to the agent; one of the round's list unless given.
        """
        if messages is None:
            messages = [self.told()]
        tag = ("round", "view")
        self.end = {
            "sums": [
                {
                    **self._tag(dict(zip(tag, more, strict=False))),
                    "fragment": index,
                    "exponent": piece.exponent,
                    "made": int(how == "made"),
                    "lanes": spans(piece.lanes),
                }
                for index, piece, how, *more in sums
            ],
            "places": [
                {
                    **self._tag(dict(zip(tag, more, strict=False))),
                    "fragment": index,
                    "seen": list(seen),
                    "units": spans(numbers),
                }
                for index, seen, numbers, *more in places
            ],
            "counts": [self._tag(row) for row in rows("round count view", counts)],
            "sent": rows("bank aggregator round next swallow", sent),
            "windows": rows("sender highest answers", windows),
            "messages": [self._tag(dict(row)) for row in messages],
        }
        return self

    def told(self, **fields: int) -> dict[str, Any]:
        """The message of a round's list."""
        names = ("members", "fragments", "unit")
        return {name: self.usual[name] for name in names} | fields

    def counted(self, count: int, **fields: int) -> dict[str, Any]:
        """The message of so many sums."""
        return {"count": count, "fragments": self.usual["fragments"]} | fields

    @staticmethod
    def _tag(row: dict[str, Any]) -> dict[str, Any]:
        return {"view": VIEW, "round": ROUND} | row


def owned(
    own: Mapping[int, Piece], bank: int = BANK, conversion: int = OFFER
) -> list[dict[str, Any]]:
    """The own lanes, by fragment."""
    return [
        {
            "bank": bank,
            "fragment": index,
            "conversion": conversion,
            "exponent": piece.exponent,
            "lanes": spans(piece.lanes),
        }
        for index, piece in own.items()
    ]


def next_ones(
    sent: Mapping[int, int], round_: int = ROUND, swallow: int = 0
) -> list[dict[str, Any]]:
    """By aggregator, the fragment to send next."""
    keys = "bank aggregator round next swallow"
    return rows(
        keys, [(round_ & 1, number, round_, index, swallow) for number, index in sent.items()]
    )
