# SPDX-License-Identifier: Apache-2.0
"""Random frames for a switch that make sense where they come: about one in four has one field spoilt.

The model of the switch goes along while they are made, so what is said of view, holder, round and list is so.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from tests.p4.model import FRAGMENT, TOKEN, ModelSwitch
from tests.switched import CONTROLLER, HOST, MACS, NETWORK, PORTS, ROUND, VIEW, recorded
from tests.vectors import encode

NUMBERS = (1, 2, 3)
ALL = 0b111
LAST = 2**32 - 1


MEMBERS = recorded(MACS[: len(NUMBERS)])


def mac(number: int) -> bytes:
    """As that of member `number`."""
    return bytes([2, 0, 0, 0, 0, number])


class Frame(bytes):
    """In a report it is short."""

    def __repr__(self) -> str:
        return encode.to_text(self[:62], 14, 46)


@dataclass
class Draft:
    """A frame that is not packed yet: any of it can still be spoilt."""

    port: int
    source: bytes
    header: dict[str, Any]
    body: list[tuple[str, dict[str, Any]]]
    tail: bytes = b""
    cut: int = 0
    to: bytes = b"\xff" * 6
    ethertype: int = encode.ETHERTYPE
    tag: int | None = None

    def packed(self) -> Frame:
        """From the Ethernet header on, as a wire carries it: 60 bytes or more."""
        data = encode.frame(self.header, *self.body, tail=self.tail)
        whole = self.to + self.source + self.ethertype.to_bytes(2, "big") + data
        whole = whole[: max(14, len(whole) - self.cut)]
        if self.tag is not None:
            whole = encode.put_tag(whole, network=self.tag)
        return Frame(whole.ljust(60, b"\0"))


#: A number for each frame, and one for all: a failing sequence loses frames, but none of the others changes its mind.
numbers = st.tuples(st.integers(0, LAST), st.lists(st.integers(0, LAST), min_size=8, max_size=24))


def sequence(of_all: int, of_each: list[int]) -> list[tuple[int, Frame]]:
    """(port, frame): rounds of members that hand the token on and send, by the switch's adding or without."""
    model = ModelSwitch(NETWORK, PORTS, CONTROLLER, MEMBERS)
    adding = of_all % 4 > 0
    width = (32, 32, 16, 8)[of_all // 4 % 4]
    found: list[tuple[int, Frame]] = []
    for number in of_each:
        rng = Random(of_all << 32 | number)  # many numbers are small and alike
        what = rng.randint(0, 11)
        if not model.owner or what < 5:
            draft = _tokens(rng, model, adding)
        elif what == 11:
            draft = _others(rng)
        else:
            draft = _fragments(rng, model, adding, width)
        drafts = [draft]
        if model.owner and rng.randint(0, 11) == 11:
            drafts.insert(0, _between_members(rng, model))
        for draft in drafts:
            if found and rng.randint(0, 3) == 3:
                _spoil(rng, draft)
            if rng.randint(0, 3) == 3:
                draft.tag = rng.randint(0, 7) << 13 | rng.choice([0] * 40 + [1, 0xFFF, 0x1000])
            frame = draft.packed()
            model.take(draft.port, frame)
            found.append((draft.port, frame))
    return found


sequences = numbers.map(lambda both: sequence(*both))


def _header(sender: int, view: int, round_: int, **more: int) -> dict[str, Any]:
    usual = {"network": NETWORK, "view": view, "round": round_, "sender": sender, "sequence": 1}
    return usual | more


def _tokens(rng: Random, model: ModelSwitch, adding: bool) -> Draft:
    """The next one: to another member, of a closed list, of the next round or view; or an old one once more."""
    by = model.owner if model.owner in NUMBERS else rng.choice(NUMBERS)
    view, round_, position = model.view or VIEW, model.round or ROUND, model.position + 1
    listed, settled, flags = model.listed, model.settled, 0
    what = rng.choice(["hand"] * 16 + ["settle"] * 4 + ["round", "view", "repeat", "repeat"])
    if adding and not listed and rng.randint(0, 5):
        listed = rng.choice([ALL, ALL, 0b011, 0b110])
    if what == "settle":
        settled += 1
    elif what == "round":
        round_, settled = min(round_ + 1, LAST), 0
        listed = rng.choice([0, listed, listed])
    elif what == "view":
        view, position = min(view + 1, LAST), 1
    elif what == "repeat":
        position, flags = max(0, position - rng.randint(1, 2)), encode.REPEAT
    fields = {
        "generation": position >> 32,
        "hop": position & LAST,
        "owner": by % 3 + 1 if rng.randint(0, 3) else rng.choice(NUMBERS),
        "members": HOST,
        "listed": listed,
        "settled": settled,
    }
    entries: list[tuple[str, dict[str, Any]]] = [("entry", {}) for _ in MACS]
    header = _header(by, view, round_, flags=flags)
    return Draft(by, mac(by), header, [("token", fields), *entries])


def _fragments(rng: Random, model: ModelSwitch, adding: bool, width: int) -> Draft:
    """Of the first few that not all have: the holder's, or, where the switch adds, anybody's."""
    by = rng.choice(NUMBERS) if adding else model.owner
    few = [model.settled, model.settled + 1]
    lacks = [index for index in few if not model.seen(index) >> by - 1 & 1]
    index = rng.choice(lacks if lacks and rng.randint(0, 3) else few)
    fields = {"index": index, "fragments": 1000, "width": width, "shift": 0}
    header = _header(by, model.view, model.round, flags=encode.ADD if adding else 0)
    piece = rng.randbytes(rng.randint(8, 24))
    tail = (piece * (1440 // len(piece) + 1))[:1440]
    port = by if by in PORTS else 1
    return Draft(port, mac(by & 0xFF), header, [("fragment", fields)], tail)


def _others(rng: Random) -> Draft:
    """A control frame, a list, or what is none of ours."""
    by = rng.choice(NUMBERS)
    header = _header(by, rng.randint(0, 4), 7)
    body = rng.choice([("want", {"ready": 3}), ("view", {"step": 3}), ("view", {"step": 1})])
    draft = Draft(by, mac(by), header, [body])
    if rng.randint(0, 2) == 0:
        draft.ethertype = 0x0800
        draft.to = rng.choice([b"\xff" * 6, mac(1), mac(2), mac(3), mac(7)])
    return draft


def _between_members(rng: Random, model: ModelSwitch) -> Draft:
    """A frame of stripes or of servers, to another member, or to all."""
    by = rng.choice(NUMBERS)
    name = rng.choice((*encode.STRIPES, *encode.SERVERS))
    header = _header(by, model.view, model.round, flags=rng.choice([0, encode.ANSWER]))
    fields = {"index": rng.randint(0, 3), "fragments": 4, "width": 32}
    tail = b"" if name == "taken" else rng.randbytes(16) * 90
    draft = Draft(by, mac(by), header, [(name, fields)], tail)
    draft.to = rng.choice([mac(by % 3 + 1), mac((by + 1) % 3 + 1), b"\xff" * 6])
    return draft


def _spoil(rng: Random, draft: Draft) -> None:
    """One field of it, most often such as lies close by."""
    header, (name, fields) = draft.header, draft.body[0]
    ways = ["network", "version", "type", "length", "cut", "view", "round"]
    ways += ["sender", "member", "source", "port", "port"]
    if name == "token":
        ways += ["owner", "members", "ranges", "position", "position", "settled", "listed"]
    elif name == "fragment":
        ways += [
            "index",
            "index",
            "index",
            "index",
            "index",
            "fragments",
            "width",
            "shift",
            "shift",
            "flags",
            "holder",
        ]
    near = rng.choice([-1, 1])
    match rng.choice(ways):
        case "network":
            header["network"] ^= 1
        case "version":
            header["version"] = rng.choice([0, 2])
        case "type":
            header["type"] = rng.choice([0, 14, 17, 18, 20, 24, 99, 255, TOKEN, FRAGMENT])
        case "length":
            header["length"] = rng.choice([0, 31, 32, 47, 72, 151, 1487, 1489, 65535])
        case "cut":
            draft.cut = rng.choice([1, 4, 20, 100, 1440, 1445, 1470, 1486])
        case "view":
            header["view"] = (header["view"] + near) & LAST
        case "round":
            header["round"] = (header["round"] + near) & LAST
        case "sender":
            header["sender"] = rng.choice([0, 1, 2, 3, 5, 0x0102, 65535])
        case "holder" | "member":
            by = rng.choice(NUMBERS)
            draft.port, draft.source, header["sender"] = by, mac(by), by
        case "source":
            draft.source = mac(rng.randint(1, 9))
        case "port":
            draft.port = rng.choice(PORTS)
        case "owner":
            fields["owner"] = rng.choice([0, 5, 65535])
        case "members":
            fields["members"] = rng.choice([0, 3, 5, 255])
        case "ranges":
            fields["ranges"] = rng.choice([1, 65535])
        case "position":
            fields["hop"] = max(0, fields["hop"] - rng.randint(1, 3))
        case "settled":
            fields["settled"] = rng.choice([0, 1, 2, 600])
        case "listed":
            fields["listed"] = rng.choice([0, 0b001, 0b101, ALL | 1 << 63])
        case "index":
            fields["index"] = (fields["index"] + rng.choice([-1, -1, 512, 513, 900])) & LAST
        case "fragments":
            fields["fragments"] = fields["index"] + rng.randint(0, 1)
        case "width":
            fields["width"] = rng.choice([0, 8, 16, 32, 33])
        case "shift":
            fields["shift"] = rng.choice([1, 3, 26, 27, 51, 255])
        case "flags":
            header["flags"] ^= rng.choice([encode.ADD, encode.REPAIR])


#: How often a thousand random sequences must come to what, at the least: less than half of what was seen.
LEAST = {
    "token": 4000,
    "fragment": 600,
    "added": 800,
    "duplicate": 400,
    "summed": 100,
    "answered": 500,
    "unlisted": 200,
    "switched": 200,
    "control": 200,
    "round": 150,
    "stranger": 150,
    "malformed": 150,
    "version": 100,
    "truncated": 80,
    "stale": 40,
    "type": 20,
    "view": 50,
    "shift": 30,
    "holder": 10,
    "window": 30,
    "stripe": 200,
    "server": 200,
    "sums compared": 500,
    "whole sums compared": 80,
}
