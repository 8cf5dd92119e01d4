# SPDX-License-Identifier: Apache-2.0
"""How sequences of frames of stripes are written down: a host's (`striping.py`), a Linux switch's (`switching.py`).

What a sum and its remainder must be comes from `tests/striped_reference.py`; all else is given by hand beside each
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.striped_reference import NOT_FINITE, PAYLOAD_BITS, Piece, add
from tests.vectors import encode
from tests.vectors.encode import Fields
from tests.vectors.scenario import NETWORK, ROUND, TX, VIEW, Written, mac

#: The address of a switch that adds, and that of everybody: sums go to it.
SWITCH = "02:6e:69:63:70:73"
GROUP = "03:6e:69:63:70:73"
REDIRECT = "redirect"
UNIT = -20


def part(width: int, exponent: int, values: Mapping[int, int] | None = None) -> Piece:
    """A contribution's fragment: lane -> value, all others 0."""
    lanes = [0] * (PAYLOAD_BITS // width)
    for at, value in (values or {}).items():
        lanes[at] = value
    return Piece(exponent, lanes)


def dense(width: int, exponent: int, seed: int) -> Piece:
    """Lanes of any size from a generator that is easy to write again; the limits of a lane come first."""
    state, lanes, most = seed, [], 2 ** (width - 1)
    for _ in range(PAYLOAD_BITS // width):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        lanes.append((state >> 64 - width) - most)
    lanes[:6] = -most, most - 1, -1, 0, 1, -most
    return Piece(exponent, lanes)


def units(piece: Piece, unit: int = UNIT) -> list[int]:
    """Its lanes in units, as they are added."""
    by = piece.exponent - unit
    return [lane << by if by >= 0 else lane >> -by for lane in piece.lanes]


def plus(*lists: Sequence[int]) -> list[int]:
    """Lane by lane."""
    return [sum(lanes) for lanes in zip(*lists, strict=True)]


@dataclass(frozen=True)
class Out:
    """What goes back: its type, whether to everybody, what differs from the frame in, and the lanes of `piece`."""

    kind: str
    everybody: bool
    fields: Fields
    piece: Piece | None = None


def made(piece: Piece, **fields: int) -> Out:
    """A sum, to everybody."""
    return Out("sum", True, {"exponent": piece.exponent} | fields, piece)


def answered(piece: Piece, **fields: int) -> Out:
    """A sum, to the member that has asked."""
    return Out("sum", False, {"exponent": piece.exponent} | fields, piece)


def lacking(members: int, **fields: int) -> Out:
    """There is no sum yet: these members have not contributed."""
    return Out("lacking", False, {"members": members} | fields)


def clocked(index: int, piece: Piece, **fields: int) -> Out:
    """The own contribution to that fragment, to the aggregator of the sum that has come."""
    return Out("contribution", False, {"index": index, "exponent": piece.exponent} | fields, piece)


def spans(lanes: Sequence[int]) -> list[dict[str, Any]]:
    """Values from a lane on; eight zeros or more are left out."""
    found: list[dict[str, Any]] = []
    for at in (at for at, lane in enumerate(lanes) if lane):
        if not found or at - found[-1]["lane"] - len(found[-1]["values"]) >= 8:
            found.append({"lane": at, "values": []})
        run = found[-1]
        run["values"] += [0] * (at - run["lane"] - len(run["values"])) + [lanes[at]]
    return found


@dataclass
class _Question:
    """The newest frame in."""

    data: bytes = b""
    header: Fields = field(default_factory=dict)
    body: Fields = field(default_factory=dict)
    of: str = ""


class Contributing(Written):
    """One sequence of frames of stripes, for a host or a Linux switch.

    Attributes: `usual`, what the frames of a round say unless told otherwise.
    """

    breaks = (14, 46, 70)
    #: The address and the number of the host or switch, and the verdict of a frame that goes to everybody.
    address, number, to_everybody = SWITCH, 0, REDIRECT

    def begin(self, width: int, members: int, fragments: int) -> None:
        """Of the rounds."""
        self._sequence = self._answers = 0
        self._question = _Question()
        self.usual: Fields = {"members": members, "index": 0, "fragments": fragments, "number": 0}
        self.usual |= {"width": width, "exponent": UNIT, "unit": UNIT, "behind": 0}

    def part(self, exponent: int, values: Mapping[int, int] | None = None) -> Piece:
        """`part` of the rounds' width."""
        return part(self.usual["width"], exponent, values)

    def dense(self, exponent: int, seed: int) -> Piece:
        """`dense` of the rounds' width."""
        return dense(self.usual["width"], exponent, seed)

    def total(
        self, *parts: Piece, unit: int | None = None, carried: list[int] | None = None
    ) -> Piece:
        """Their sum, with what is left over in units, by the reference.

        `unit`: the rounds', unless given; `carried`: what a switch adds of a round before, in units.
        """
        found = add(list(parts), self.usual["width"], self._unit(unit), carried)
        zeros = [0] * len(found.lanes)
        if found.exponent == NOT_FINITE:  # its lanes have no meaning
            return Piece(NOT_FINITE, zeros, zeros)
        return replace(found, rest=found.rest or zeros)

    def _unit(self, unit: int | None) -> int:
        return int(self.usual["unit"]) if unit is None else unit

    def agent(self, say: str, **config: Any) -> None:
        """Instead of a frame: the configuration is changed."""
        assert set(config) <= set(self.config)
        self.steps.append({"say": say, "config": config})

    def contribution(
        self, say: str, counters: str, piece: Piece, sender: int = 2, **more: Any
    ) -> None:
        """A member's fragment; `counters`, words between blanks, rise by one."""
        self.give("contribution", say, counters, piece, sender, **more)

    def ask(self, say: str, counters: str, sender: int = 2, **more: Any) -> None:
        """A question for a sum; its number is that of the frame unless given."""
        piece = self.part(0)
        self.give("ask", say, counters, piece, sender, **{"number": self._sequence + 1} | more)

    def give(
        self,
        kind: str,
        say: str,
        counters: str,
        piece: Piece,
        sender: int,
        *,
        out: Out | None = None,
        verdict: str = "drop",
        heard: bool | None = None,
        header: Mapping[str, Any] | None = None,
        source: str | None = None,
        to: str | None = None,
        key: bytes | None = None,
        cut: int = 0,
        **fields: int,
    ) -> None:
        """A frame in; `out`: what goes back; otherwise the verdict.

        Args:
            header: fields that differ from the usual ones.
            source, to: addresses, where they are not the sender's and those to which such frames go.
            key: another than the view's.
            cut: so many bytes are missing at the end.
        """
        self._sequence += 1
        fields_of: Fields = {"network": NETWORK, "view": VIEW, "round": ROUND, "sender": sender}
        fields_of |= {"sequence": self._sequence, **(header or {})}
        body = self.usual | {"exponent": piece.exponent} | fields
        width = self.usual["width"]
        tail = encode.lanes(width, dict(enumerate(piece.lanes)))
        data = encode.frame(fields_of, (kind, body), tail=tail)
        if self.key is not None and "tag" not in fields_of:
            data = encode.sign(data, key or self.key)
        usual_to = GROUP if kind == "sum" else self.address
        data = encode.ethernet(source or _address(sender), data, to=to or usual_to)
        of = encode.words([("header", fields_of), (kind, body)])
        self._question = _Question(data[: len(data) - cut], fields_of, body, of)
        self.again(say, counters, out=out, verdict=verdict, heard=heard)

    def again(
        self,
        say: str,
        counters: str,
        *,
        out: Out | None = None,
        verdict: str = "drop",
        heard: bool | None = None,
    ) -> None:
        """The newest frame once more."""
        asked, sent = self._question, b""
        if out is not None:
            verdict = self.to_everybody if out.everybody else TX
            sent = self._out(out)
        self.note(say, asked.data, verdict, counters.split(), out=sent, of=asked.of, heard=heard)
        if verdict == REDIRECT:
            self.steps[-1]["out"] = encode.to_text(sent, *self.breaks)

    def _out(self, out: Out) -> bytes:
        asked = self._question
        header = {name: asked.header[name] for name in ("network", "view", "round")}
        header |= {"flags": encode.ANSWER, "sender": self.number}
        if self.key is not None:
            self._answers += 1
            header["sequence"] = self._answers
        width = self.usual["width"]
        lanes = encode.lanes(width, dict(enumerate(out.piece.lanes)) if out.piece else {})
        data = encode.frame(header, (out.kind, asked.body | out.fields), tail=lanes)
        if self.key is not None:
            data = encode.sign(data, self.key)
        to = GROUP if out.everybody else _address(asked.header["sender"])
        return encode.ethernet(self.address, data, to=to)


def _address(number: int) -> str:
    return mac(number & 0xFF) if number else SWITCH


def bits(*numbers: int) -> int:
    """The list of these members."""
    return sum(1 << number - 1 for number in numbers)


def rows(keys: str, found: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows as objects with these keys; the last keys may be missing."""
    return [dict(zip(keys.split(), row, strict=False)) for row in found]
