# SPDX-License-Identifier: Apache-2.0
"""How sequences are written down: frames in, and what a person expects of them.

A `Scenario` starts from a configuration of the XDP program and collects steps. The expectations are
given by hand beside each step and at the end; nothing is recorded from a program under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.vectors import encode
from tests.vectors.encode import Fields

NETWORK = 0x0A0B0C0D
VIEW = 3
ROUND = 7
PASS, DROP, TX = "pass", "drop", "tx"
NOBODY = "00:00:00:00:00:00"


def mac(number: int) -> str:
    """MAC address of the member with that number."""
    return f"02:00:00:00:00:{number:02x}"


class Written:
    """A sequence for one host: its configuration, steps, and what is left at the end.

    Args:
        name: of the file.
        why: what it shows, one sentence.
        members: how many; member k has `mac(k)`.
        left: numbers of the members that have left the view.
        key: of the view, 16 bytes: then frames carry tags unless said otherwise.
        usual: the configuration; config: what differs from it.
    """

    #: Where a frame's text is broken: behind the headers.
    breaks: tuple[int, ...] = (14, 46)

    def __init__(
        self,
        name: str,
        why: str,
        *,
        members: int,
        left: Sequence[int],
        key: bytes | None,
        usual: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        assert set(config) <= set(usual), set(config) - set(usual)
        self.name, self.why, self.key = name, why, key
        numbers = range(1, members + 1)
        self.members = [NOBODY if number in left else mac(number) for number in numbers]
        self.config: dict[str, Any] = {**usual, **config}
        self.steps: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}

    def note(
        self,
        say: str,
        data: bytes,
        verdict: str,
        counters: Sequence[str],
        *,
        out: bytes,
        of: str,
        heard: bool | None,
    ) -> None:
        """Write a step down."""
        step: dict[str, Any] = {"say": say} | ({"of": of} if of else {})
        step |= {"frame": encode.to_text(data, *self.breaks), "verdict": verdict}
        step["counters"] = list(counters)
        if verdict == TX:
            step["out"] = encode.to_text(out, *self.breaks)
        if heard is not None:
            step["heard"] = heard
        self.steps.append(step)

    def as_json(self, **start: Any) -> dict[str, Any]:
        """What the file holds; `start`: what else there is at the start."""
        key = {"key": self.key.hex()} if self.key is not None else {}
        about = {"name": self.name, "why": self.why, "members": self.members, **key}
        return {**about, "config": self.config, **start, "steps": self.steps, "end": self.end}


class Scenario(Written):
    """One sequence.

    Args:
        name, why, members, left, key: as `Written`.
        config: what differs from the usual configuration (`nicps_config`). `alive` stands for
            `alive_until_ns`: true is an hour ahead, false is past.
    """

    def __init__(
        self,
        name: str,
        why: str,
        *,
        members: int = 3,
        left: Sequence[int] = (),
        key: bytes | None = None,
        **config: Any,
    ) -> None:
        numbers = range(1, members + 1)
        own = config.get("number", 1)
        after = [
            number for number in (*range(own + 1, members + 1), *numbers) if number not in left
        ]
        usual = {
            "enabled": 1,
            "network": NETWORK,
            "view": VIEW,
            "round_low": ROUND,
            "round_high": ROUND,
            "number": 1,
            "members": members,
            "live": members - len(left),
            "next": after[0],
            "bounce": 1,
            "round": ROUND,
            "sent_seen": 0,
            "own_sent": 0,
            "blocks": 4,
            "keyed": int(key is not None),
            "sums": 0,
            "sums_next": 0,
            "alive": True,
            "position": 0,
        }
        super().__init__(name, why, members=members, left=left, key=key, usual=usual, config=config)
        self._sequence = self._bounced = 0

    def step(
        self,
        say: str,
        data: bytes,
        verdict: str,
        *counters: str,
        out: bytes = b"",
        of: str = "",
        heard: bool | None = None,
    ) -> None:
        """A frame in, from its Ethernet header on; the verdict; the counters that rise by one.

        Args:
            heard: whether it is taken for a member's sign of life.
        """
        self.note(say, data, verdict, counters, out=out, of=of, heard=heard)

    def agent(self, say: str, **config: Any) -> None:
        """The agent changes the configuration between two frames."""
        assert set(config) <= set(self.config)
        self.steps.append({"say": say, "config": config})

    def frame(
        self,
        structs: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        source: str | None = None,
        tail: bytes = b"",
        key: bytes | None = None,
        **header: Any,
    ) -> tuple[bytes, str]:
        """A frame of the usual network, view and round, and what it is in words; `key`: another than the view's."""
        self._sequence += 1
        usual: Fields = {
            "network": NETWORK,
            "view": VIEW,
            "round": ROUND,
            "sender": 2,
            "sequence": self._sequence,
        }
        fields = usual | header
        data = encode.frame(fields, *structs, tail=tail)
        if self.key is not None and "tag" not in header:
            data = encode.sign(data, key or self.key)
        sender = source or mac(fields["sender"] & 0xFF)
        return encode.ethernet(sender, data), encode.words([("header", fields), *structs])

    def fragment(
        self,
        say: str,
        verdict: str,
        *counters: str,
        values: Mapping[int, int] | None = None,
        source: str | None = None,
        header: Mapping[str, Any] | None = None,
        tail: bytes | None = None,
        key: bytes | None = None,
        heard: bool | None = None,
        **fields: Any,
    ) -> bytes:
        """A fragment: two in a contribution, 32-bit lanes, unless said otherwise."""
        usual = {"index": 0, "fragments": 2, "width": 32, "shift": 0, "samples": 32}
        fragment = usual | fields
        per_frame = {0: 1440, 8: 1440, 16: 720}.get(fragment["width"], 360)
        fragment.setdefault("lanes", per_frame)
        if tail is None:
            width = fragment["width"] if fragment["width"] in (0, 8, 16, 32) else 32
            tail = encode.lanes(width, values or {})
        data, of = self.frame(
            [("fragment", fragment)], source=source, tail=tail, key=key, **(header or {})
        )
        self.step(say, data, verdict, *counters, of=of, heard=heard)
        return data

    def token(
        self,
        say: str,
        verdict: str,
        *counters: str,
        hop: int,
        owner: int = 1,
        source: str | None = None,
        header: Mapping[str, Any] | None = None,
        ranges: Sequence[Mapping[str, Any]] = (),
        ranges_said: int | None = None,
        out: Mapping[str, Any] | None = None,
        key: bytes | None = None,
        heard: bool | None = None,
        **fields: Any,
    ) -> bytes:
        """A token of generation 4 with an entry a member; `out` is what differs in the bounced one.

        In `out`, `header` fields go by their names with `header_` in front.
        """
        members = len(self.members)
        entries = [("entry", {"ready": number, "unit": -128}) for number in range(1, members + 1)]
        token = {
            "generation": 4,
            "hop": hop,
            "owner": owner,
            "members": members,
            "ranges": len(ranges) if ranges_said is None else ranges_said,
            "unit": -40,
            "unit_before": -40,
        } | fields
        rest: list[tuple[str, Mapping[str, Any]]] = [*entries, *(("range", r) for r in ranges)]
        data, of = self.frame([("token", token), *rest], source=source, key=key, **(header or {}))
        bounced = b""
        if out is not None:
            own = self.config["number"]
            changed = {
                k.removeprefix("header_"): v for k, v in out.items() if k.startswith("header_")
            }
            body = token | {k: v for k, v in out.items() if not k.startswith("header_")}
            fields_out: Fields = {
                "network": NETWORK,
                "view": VIEW,
                "round": ROUND,
                "sequence": self._sequence,
                **(header or {}),
                "sender": own,
                **changed,
            }
            if self.key is not None:
                self._bounced += 1
                fields_out["sequence"] = self._bounced
            whole = encode.frame(fields_out, ("token", body), *rest)
            if self.key is not None:
                whole = encode.sign(whole, self.key)
            bounced = encode.ethernet(mac(own), whole)
        self.step(say, data, verdict, *counters, out=bounced, of=of, heard=heard)
        return data

    def ends(
        self,
        *,
        progress: Sequence[tuple[int, ...]] = (),
        slots: Sequence[tuple[int, int, Sequence[int]]] = (),
        accumulators: Sequence[Mapping[str, Any]] = (),
        ring: tuple[int, int] = (0, 0),
        bounced: tuple[int, int] = (0, 0),
        bounces: int = 0,
        windows: Sequence[tuple[int, int, int, int]] = (),
        view: int = VIEW,
    ) -> Scenario:
        """The state at the end; whatever is not named is as it was at the start.

        Args:
            progress: (round, sender, distinct fragments); sender 0 is a switch's sums. A fourth
                number is the view, where it is not `view`.
            slots: (round, fragment, senders seen).
            accumulators: {"bank", "block", "lane", "values"} or, for raw bytes, {"bank", "block",
                "byte", "values"}: consecutive from there on, everything else 0.
            ring: generation and hop of the highest token seen or sent.
            bounced: the same of the last token bounced; `bounces`: how many.
            windows: (sender, highest number believed of fragments, of tokens, of repeated tokens).
        """
        keys = ("round", "sender", "count", "view")
        self.end = {
            "progress": [
                {"view": view} | dict(zip(keys, entry, strict=False)) for entry in progress
            ],
            "slots": [
                {"view": view, "round": round_, "fragment": index, "seen": list(seen)}
                for round_, index, seen in slots
            ],
            "accumulators": [dict(entry) for entry in accumulators],
            "ring": {"seen": list(ring), "bounced": list(bounced), "bounces": bounces},
            "windows": [
                {"sender": sender, "highest": highest, "token": token, "repeat": repeat}
                for sender, highest, token, repeat in windows
            ],
        }
        return self
