# SPDX-License-Identifier: Apache-2.0
"""How sequences for parameter servers are written down, as `scenario.py` has those of the other exchanges.

The expectations are given by hand beside each step and at the end, in units and in whole numbers. What an answer
repeats of its question is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.vectors import encode
from tests.vectors.encode import Fields
from tests.vectors.scenario import DROP, NETWORK, ROUND, TX, VIEW, Written, mac

#: An exponent whose lanes are units of parameters: a step with it is added as it is, at a staleness of 1.
EXACT = -40
SYNCHRONISING, NOT_YET, ABSENT, FULL = 1, 2, 3, 4
#: A channel above 0, as the header's flags have it.
URGENT = 5
ON_URGENT: Fields = {"flags": URGENT << 13}
Lanes = Mapping[int, int]


@dataclass(frozen=True)
class Answer:
    """What goes back: its type, what is not repeated of the question, and its lanes."""

    kind: str
    fields: Mapping[str, int]
    values: Lanes


def held(values: Lanes | None = None, **fields: int) -> Answer:
    """Parameters: lanes of 32 bits, the exponent that of units."""
    return Answer("held", {"width": 32, "exponent": EXACT} | fields, values or {})


def taken(**fields: int) -> Answer:
    """A short frame: taken, or the reason why not."""
    return Answer("taken", fields, {})


def runs(lanes: Lanes) -> list[dict[str, Any]]:
    """Values that lie side by side, from a lane on."""
    found: list[dict[str, Any]] = []
    for lane in sorted(lanes):
        if not found or lane != found[-1]["lane"] + len(found[-1]["values"]):
            found.append({"lane": lane, "values": []})
        found[-1]["values"].append(lanes[lane])
    return found


class Serving(Written):
    """One sequence for one host of a job with parameter servers.

    Args:
        name, why, members, left, key: as `Written`.
        parameters: of this host's part at first, in units: by push fragment and lane; all others are 0.
        config: what differs from the usual configuration (tests/vectors/README.md).
    """

    breaks = (14, 46, 70)

    def __init__(
        self,
        name: str,
        why: str,
        *,
        members: int = 5,
        left: Sequence[int] = (),
        key: bytes | None = None,
        parameters: Mapping[int, Lanes] | None = None,
        **config: Any,
    ) -> None:
        usual = {
            "network": NETWORK,
            "view": VIEW,
            "round": ROUND,
            "round_high": ROUND + 1,
            "settled": ROUND - 1,
            "version": [ROUND, 0],
            "number": 1,
            "servers": [1],
            "width": 32,
            "room": 2,
            "staleness": 1,
            "averages": 1,
            "store": 0,
            "passes": [],
        }
        super().__init__(name, why, members=members, left=left, key=key, usual=usual, config=config)
        self.fragments = -(-self.config["room"] * self.config["width"] // 32)
        self.parameters = parameters or {}
        self._sequence = self._answers = 0
        self._question: tuple[bytes, Fields, Fields, str] = b"", {}, {}, ""

    def step(
        self,
        say: str,
        data: bytes,
        *counters: str,
        out: bytes = b"",
        of: str = "",
        heard: bool | None = None,
    ) -> None:
        """A frame in, from its Ethernet header on; the counters that rise; the answer, or it is dropped."""
        verdict = TX if out else DROP
        self.note(say, data, verdict, counters, out=out, of=of, heard=heard)

    def agent(self, say: str, **config: Any) -> None:
        """The agent changes the configuration between two frames."""
        assert set(config) <= {"view", "round", "round_high", "settled", "version"}
        self.steps.append({"say": say, "config": config})

    def commit(self, say: str, round_: int, *, listed: bool = True) -> None:
        """The round is over; `listed`: its list had somebody in it."""
        settled = {"settled": round_} if listed else {}
        rounds = {"round": round_ + 1, "round_high": round_ + 2}
        self.agent(say, **rounds, version=[round_ + 1, 0], **settled)

    def frame(
        self,
        kind: str,
        body: Fields,
        tail: bytes = b"",
        *,
        source: str | None = None,
        to: str | None = None,
        key: bytes | None = None,
        **header: Any,
    ) -> bytes:
        """A frame to this host, of the usual network, view and round; `key`: another than the view's."""
        self._sequence += 1
        usual: Fields = {"network": NETWORK, "view": VIEW, "round": ROUND}
        fields = usual | {"sender": 3, "sequence": self._sequence} | header
        data = encode.frame(fields, (kind, body), tail=tail)
        if self.key is not None and "tag" not in header:
            data = encode.sign(data, key or self.key)
        data = encode.ethernet(
            source or mac(fields["sender"] & 0xFF), data, to=to or mac(self.config["number"])
        )
        of = encode.words([("header", fields), (kind, body)])
        self._question = data, fields, body, of
        return data

    def again(
        self, say: str, *counters: str, answer: Answer | None = None, heard: bool | None = None
    ) -> None:
        """The newest frame once more."""
        data, fields, body, of = self._question
        out = self._answered(fields, body, answer) if answer else b""
        self.step(say, data, *counters, out=out, of=of, heard=heard)

    def _answered(self, question: Fields, body: Fields, answer: Answer) -> bytes:
        """The answer to a question of these fields."""
        repeated = {name: body[name] for name in ("number", "index", "fragments")}
        repeated |= {"width": body["width"], "exponent": body["exponent"]}
        header = {name: question[name] for name in ("network", "view", "round")}
        channel = question.get("flags", 0) & encode.CHANNEL
        header |= {"flags": encode.ANSWER | channel, "sender": self.config["number"]}
        if self.key is not None:
            self._answers += 1
            header["sequence"] = self._answers
        tail = encode.lanes(32, answer.values) if answer.kind == "held" else b""
        data = encode.frame(header, (answer.kind, {**repeated, **answer.fields}), tail=tail)
        if self.key is not None:
            data = encode.sign(data, self.key)
        return encode.ethernet(mac(header["sender"]), data, to=mac(question["sender"]))

    def _give(
        self,
        kind: str,
        say: str,
        counters: Sequence[str],
        body: Fields,
        values: Lanes | None,
        answer: Answer | None,
        heard: bool | None,
        header: Mapping[str, Any],
    ) -> None:
        width = body["width"] if body["width"] in encode.LANES else 32
        tail = b"" if kind == "taken" else encode.lanes(width, values or {})
        self.frame(kind, body, tail, **header)
        self.again(say, *counters, answer=answer, heard=heard)

    def push(self, say: str, *counters: str, **more: Any) -> None:
        """A fragment of a step: number 1 of worker 3, the first fragment, unless said otherwise."""
        self._step("push", say, counters, {"version": 0, "number": 1}, **more)

    def contribution(self, say: str, *counters: str, **more: Any) -> None:
        """A fragment of a step for the synchronisation; `members` is the list, bit k - 1 for member k."""
        self._step("contribution", say, counters, {"members": 0b1100, "number": 9}, **more)

    def _step(
        self,
        kind: str,
        say: str,
        counters: Sequence[str],
        usual: Fields,
        *,
        values: Lanes | None = None,
        answer: Answer | None = None,
        heard: bool | None = None,
        header: Mapping[str, Any] | None = None,
        **fields: int,
    ) -> None:
        body = self._lanes_of_a_step() | usual | fields
        self._give(kind, say, counters, body, values, answer, heard, header or {})

    def _lanes_of_a_step(self) -> Fields:
        lanes = {"width": self.config["width"], "exponent": EXACT}
        return {"index": 0, "fragments": self.fragments} | lanes

    def pull(
        self,
        say: str,
        *counters: str,
        answer: Answer | None = None,
        heard: bool | None = None,
        header: Mapping[str, Any] | None = None,
        **fields: int,
    ) -> None:
        """A question for parameters: number 1 of worker 3, the first fragment, unless said otherwise."""
        body = {"version": 0, "number": 1, "index": 0, "fragments": self.config["room"]}
        body |= {"width": 32, "exponent": 0} | fields
        self._give("pull", say, counters, body, None, answer, heard, header or {})

    def held(
        self,
        say: str,
        *counters: str,
        values: Lanes | None = None,
        heard: bool | None = None,
        header: Mapping[str, Any] | None = None,
        **fields: int,
    ) -> None:
        """Parameters come, of server 2."""
        body = {"version": 0, "number": 1, "index": 0, "fragments": self.config["room"]}
        body |= {"staleness": 0, "width": 32, "exponent": EXACT} | fields
        header = {"sender": 2, "flags": encode.ANSWER} | dict(header or {})
        self._give("held", say, counters, body, values, None, heard, header)

    def taken(
        self,
        say: str,
        *counters: str,
        heard: bool | None = None,
        header: Mapping[str, Any] | None = None,
        **fields: int,
    ) -> None:
        """Server 2 acknowledges a fragment, or gives the reason why not."""
        body = self._lanes_of_a_step() | {"version": 0, "number": 1, "staleness": 1} | fields
        header = {"sender": 2, "flags": encode.ANSWER} | dict(header or {})
        self._give("taken", say, counters, body, None, None, heard, header)

    def ends(
        self,
        *,
        parameters: Mapping[int, Lanes] | None = None,
        version: tuple[int, int] = (ROUND, 0),
        full: int | None = None,
        numbers: Sequence[tuple[int, int, int]] = (),
        store: Sequence[tuple[int, int, int, int, int, Lanes]] = (),
        taken: Sequence[tuple[int, int]] = (),
        answered: Sequence[tuple[int, int, int, int, int]] = (),
        windows: Sequence[tuple[int, int, int]] = (),
        urgent: Sequence[tuple[int, int, int]] = (),
    ) -> Serving:
        """The state at the end.

        Args:
            parameters: of this host's part; a push fragment that is not named is as it was at the start.
            version: the round, and how many pushes are whole in it.
            full: the first push fragment with a parameter near the limits.
            numbers: (push fragment, worker, its newest step that was added here).
            store: (fragment of parameters, number of the pull, round, version, exponent, lanes).
            taken: (push fragment, this worker's newest step that has been acknowledged).
            answered: (server, number and staleness of the newest step, round and version told).
            windows: (sender, highest number believed of its own frames, of its answers), of channel 0.
            urgent: the same of channel `URGENT`.
        """
        self.end = {
            "parameters": laid_out({**self.parameters, **(parameters or {})}),
            "version": list(version),
            "full": full,
            "numbers": named("fragment worker number", numbers),
            "store": [
                {**stored, "lanes": runs(lanes)}
                for stored, lanes in zip(
                    named("fragment number round version exponent", [row[:-1] for row in store]),
                    (row[-1] for row in store),
                    strict=True,
                )
            ],
            "taken": named("fragment number", taken),
            "answered": named("server number staleness round version", answered),
            "windows": named(
                "channel sender highest answers",
                [(0, *row) for row in windows] + [(URGENT, *row) for row in urgent],
            ),
        }
        return self

    def as_json(self, **start: Any) -> dict[str, Any]:
        """As `Written`, with the parameters at the start."""
        return super().as_json(parameters=laid_out(self.parameters), **start)


def laid_out(fragments: Mapping[int, Lanes]) -> list[dict[str, Any]]:
    """Values of each fragment, from a lane on."""
    return [
        {"fragment": fragment, **run}
        for fragment in sorted(fragments)
        for run in runs(fragments[fragment])
    ]


def named(keys: str, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows as objects with these keys."""
    return [dict(zip(keys.split(), row, strict=True)) for row in rows]
