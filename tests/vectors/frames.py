# SPDX-License-Identifier: Apache-2.0
"""The frames of `frames.json`: every type at its edges, and what must be refused. More: `exchange_frames.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.vectors.encode import (
    BOUNCED,
    CLOSING,
    COMPLETE,
    OFFERED,
    PARKED,
    REPAIR,
    REPEAT,
    TOKEN_WANTED,
    frame,
    lanes,
    struct_bytes,
)

U8, U16, U32, U64 = (2**bits - 1 for bits in (8, 16, 32, 64))
HEADER = {"network": 0x0A0B0C0D, "view": 3, "round": 7, "sender": 2, "sequence": 41}
MAC = [bytes.fromhex(f"0200000000{number:02x}") for number in range(1, 65)]


class Vector(NamedTuple):
    """One frame: its structs with their fields, the header first."""

    name: str
    header: dict[str, Any]
    structs: tuple[tuple[str, dict[str, Any]], ...]
    tail: bytes = b""


def _token(**fields: Any) -> dict[str, Any]:
    usual = {"generation": 4, "hop": 100, "owner": 2, "sent": 12, "unit": -40, "unit_before": -41}
    return usual | fields


def _installed(**fields: Any) -> dict[str, Any]:
    usual = {"nonce": 9, "number": 4, "base": 3, "ballot": 2, "values": 1}
    return usual | {"step": 3, "addressee": 2} | fields


def _vote(**fields: Any) -> dict[str, Any]:
    usual = {"nonce": U64, "ballot": 2, "phase": 3, "round": 7, "decided": 3, "mac": MAC[0]}
    return usual | fields


ENTRIES = (
    {"samples_before": 32, "samples": 32, "ready": 0, "read": 6, "marks": 3, "unit": -128},
    {"samples_before": 24, "samples": 0, "ready": 17, "read": 6, "marks": 0, "unit": -40},
)
FRAMES = (
    Vector("call", HEADER | {"view": 0, "round": 0, "sender": 0}, (("call", {"nonce": 1}),), b"h1"),
    Vector(
        "call with the largest numbers",
        HEADER | {"tag": U64},
        (("call", {"nonce": U64, "view": U32, "ballot": U32}),),
    ),
    Vector(
        "answer",
        HEADER | {"sender": 0},
        (("answer", {"nonce": 0x1122334455667788, "view": 2}),),
        b"h2",
    ),
    Vector(
        "answer of a host with a name beyond ASCII",
        HEADER,
        (("answer", {"nonce": 5, "fresh": U64, "view": U32, "stage": 2}),),
        "höst-3".encode(),
    ),
    Vector(
        "view: proposal without the third member",
        HEADER | {"sender": 1},
        (("view", {"live": 0b1011, "number": 4, "base": 3, "ballot": 1, "step": 1}),),
    ),
    Vector(
        "view: installed, two members",
        HEADER | {"view": 0, "sender": 1},
        (
            ("view", _installed(members=2)),
            ("view_value", {"live": 3, "seed": bytes(range(16)), "lead": 1, "unit": -40}),
            ("view_member", {"mac": MAC[0], "name": b"h1"}),
            ("view_member", {"mac": MAC[1], "name": b"a-14-byte-name"}),
        ),
    ),
    Vector(
        "view: installed, and its job is done",
        HEADER | {"view": 0, "sender": 1},
        (
            ("view", _installed(members=1, addressee=1, ended=2)),
            ("view_value", {"live": 1, "seed": bytes(range(16)), "lead": 1, "unit": -40}),
            ("view_member", {"mac": MAC[0], "name": b"h1"}),
        ),
    ),
    Vector(
        "view: to be accepted, 64 members: 1392 bytes",
        HEADER | {"sender": 64},
        (
            ("view", _installed(members=64, step=2)),
            (
                "view_value",
                {"live": U64, "seed": b"\xff" * 16, "follows": 3, "phase": 4, "round": U32}
                | {"lead": 64, "unit": -128},
            ),
            *(("view_member", {"mac": mac, "name": b"h%d" % k}) for k, mac in enumerate(MAC, 1)),
        ),
    ),
    Vector("vote: promise", HEADER, (("vote", _vote(step=1, complete=1)),)),
    Vector(
        "vote: promise, with what was accepted before",
        HEADER,
        (
            ("vote", _vote(step=1, accepted_ballot=1, accepted_mac=MAC[2], values=1, members=1)),
            ("view_value", {"live": 1, "follows": 3, "phase": 4, "round": 8, "lead": 1}),
            ("view_member", {"mac": MAC[0], "name": b"h1"}),
        ),
    ),
    Vector(
        "vote: 64 members, 8 channels: 1484 bytes",
        HEADER | {"sender": 64},
        (
            (
                "vote",
                _vote(step=1, complete=1, accepted_ballot=U32, accepted_mac=MAC[63])
                | {"values": 1, "members": 64, "channels": 7, "standings": 7},
            ),
            ("view_value", {"live": U64, "seed": b"\xff" * 16, "round": U32, "lead": 64}),
            *(("view_member", {"mac": mac, "name": b"h%d" % k}) for k, mac in enumerate(MAC, 1)),
            *(("view_channel", {"channel": k, "round_low": 7 + k}) for k in range(1, 8)),
            *(
                ("standing", {"channel": k, "complete": 1, "round_high": U16, "round_low": k})
                for k in range(1, 8)
            ),
        ),
    ),
    Vector(
        "view: to be accepted, 64 members, 8 channels: 1434 bytes",
        HEADER | {"sender": 64},
        (
            ("view", _installed(members=64, step=2, channels=7)),
            ("view_value", {"live": U64, "seed": b"\xff" * 16, "round": U32, "lead": 64}),
            *(("view_member", {"mac": mac, "name": b"h%d" % k}) for k, mac in enumerate(MAC, 1)),
            *(
                ("view_channel", {"channel": k, "round_high": 1, "round_low": 7 + k})
                for k in range(1, 8)
            ),
        ),
    ),
    Vector(
        "decision: train",
        HEADER | {"sender": 1},
        (("decision", {"number": 2, "generation": 5, "phase": 2}),),
        b'{"rounds":100}',
    ),
    Vector(
        "decision: stop", HEADER, (("decision", {"number": U32, "generation": U32, "phase": 5}),)
    ),
    Vector("acknowledgement of the list", HEADER, (("ack", {"number": 0, "prepared": 1}),)),
    Vector("acknowledgement: heard", HEADER | {"flags": REPEAT}, (("ack", {"number": 2}),)),
    Vector(
        "acknowledgement with an answer", HEADER, (("ack", {"number": 3, "prepared": 1}),), b"{}"
    ),
    Vector(
        "token, open, two members",
        HEADER,
        (("token", _token(members=2)), *(("entry", entry) for entry in ENTRIES)),
    ),
    Vector(
        "token, closing, with missing ranges",
        HEADER | {"flags": REPEAT | BOUNCED | PARKED},
        (
            ("token", _token(members=2, ranges=2, state=CLOSING, idle=3)),
            *(("entry", entry) for entry in ENTRIES),
            ("range", {"first": 0, "count": 1, "sender": 1}),
            ("range", {"first": U32, "count": U16, "sender": 64}),
        ),
    ),
    Vector(
        "token, every number at its largest",
        {
            "flags": U16,
            "network": U32,
            "view": U32,
            "round": U32,
            "sender": U16,
            "sequence": U32,
            "tag": U64,
        },
        (
            (
                "token",
                {
                    "generation": U32,
                    "hop": U32,
                    "owner": U16,
                    "state": U8,
                    "members": 1,
                    "idle": U16,
                    "ranges": 0,
                    "sent": U32,
                    "unit": 127,
                    "unit_before": -128,
                    "stripe": U16,
                    "listed": U64,
                    "settled": U32,
                    "reserved": U32,
                },
            ),
            (
                "entry",
                {
                    "samples_before": U32,
                    "samples": U32,
                    "ready": U32,
                    "digest": U32,
                    "read": U16,
                    "marks": U8,
                    "unit": 127,
                },
            ),
        ),
    ),
    Vector(
        "token, 64 members and the 18 ranges that still fit: 1496 bytes",
        HEADER,
        (
            ("token", _token(members=64, ranges=18)),
            *(("entry", {"ready": k}) for k in range(64)),
            *(("range", {"first": 10 * k, "count": k + 1, "sender": 2}) for k in range(18)),
        ),
    ),
    Vector("token without members", HEADER, (("token", _token(members=0)),)),
    Vector(
        "fragment of 32-bit lanes",
        HEADER,
        (
            (
                "fragment",
                {"index": 0, "fragments": 2, "lanes": 360, "width": 32, "shift": 26, "samples": 32},
            ),
        ),
        lanes(32, {0: 1, 1: -1, 2: 2**31 - 1, 3: -(2**31)}),
    ),
    Vector(
        "fragment of 16-bit lanes, sent again",
        HEADER | {"flags": REPAIR, "sequence": 42},
        (
            (
                "fragment",
                {"index": 1, "fragments": 2, "lanes": 5, "width": 16, "shift": 42, "samples": 32},
            ),
        ),
        lanes(16, {0: 1, 1: -1, 2: 32767, 4: -32768}),
    ),
    Vector(
        "fragment of 8-bit lanes",
        HEADER,
        (
            (
                "fragment",
                {"index": 6, "fragments": 7, "lanes": 4, "width": 8, "shift": 50, "samples": 1},
            ),
        ),
        lanes(8, {0: 1, 1: -1, 2: 127, 3: -128}),
    ),
    Vector(
        "fragment of raw bytes, the last of a hand-out",
        HEADER,
        (("fragment", {"index": U32 - 1, "fragments": U32, "lanes": 5}),),
        b"hello" + bytes(1435),
    ),
    Vector(
        "want", HEADER | {"flags": TOKEN_WANTED}, (("want", {"ready": 32, "read": 6, "digest": 7}),)
    ),
    Vector(
        "want that offers, and says that all is here",
        HEADER | {"flags": OFFERED | COMPLETE},
        (("want", {"ready": 32, "read": 6, "digest": 7, "unit": -60, "window": 28}),),
    ),
    Vector(
        "want of a member that makes no progress",
        HEADER,
        (
            ("want", {"ready": 32, "read": 6, "digest": 7, "lacks": 2}),
            ("lack", {"count": 1, "member": 1}),
            ("lack", {"count": U32, "member": 64}),
        ),
    ),
    Vector("fail", HEADER, (("fail", {}),), b"job.py: forward: shapes (3,4) and (5,) do not fit"),
    Vector("fail without a reason", HEADER, (("fail", {}),)),
    Vector("leave", HEADER, (("leave", {}),), b"the training program was killed"),
    Vector(
        "probe: a question",
        HEADER | {"view": 0, "round": 0, "sender": 0},
        (("probe", {"nonce": U64, "number": 7, "step": 1}),),
    ),
    Vector(
        "probe: one frame of a train",
        HEADER | {"view": 0, "round": 0, "sender": 0},
        (("probe", {"nonce": 0x1122334455667788, "number": U32, "step": 2}),),
        bytes(1440),
    ),
    Vector(
        "echo",
        HEADER | {"view": 0, "round": 0, "sender": 0},
        (
            (
                "echo",
                {
                    "nonce": U64,
                    "first_ns": 1,
                    "last_ns": U64,
                    "count": U32,
                    "number": 7,
                    "tagged": U32 - 1,
                },
            ),
        ),
        b"h2",
    ),
    Vector(
        "script: a piece of its output",
        HEADER | {"view": 0, "round": 0, "sender": 0},
        (("script", {"run": U64, "at": 0x1122334455667788, "step": 1, "rank": 63, "waits": 1}),),
        b"epoch 1\n",
    ),
    Vector(
        "script: how it has ended",
        HEADER | {"view": 0, "round": 0, "sender": 0},
        (("script", {"run": 1, "at": 8, "step": 2}),),
        b'{"code":3}',
    ),
    Vector("echo of a host with a job", HEADER, (("echo", {"nonce": 1, "busy": 1}),)),
)

_ACK = struct_bytes("ack", {"number": 1})
_ONE = struct_bytes("token", _token(members=1))
#: What `unpack` must refuse: name and bytes.
REFUSED = (
    ("nothing", b""),
    ("one byte", b"\x01"),
    ("a header less one byte", frame(HEADER, ("ack", {"number": 1}))[:31]),
    ("version 0", frame(HEADER | {"version": 0}, ("ack", {"number": 1}))),
    ("version 2", frame(HEADER | {"version": 2}, ("ack", {"number": 1}))),
    ("type 0", frame(HEADER | {"type": 0, "length": 40}) + _ACK),
    ("type 99", frame(HEADER | {"type": 99, "length": 40}) + _ACK),
    ("type 255", frame(HEADER | {"type": 255, "length": 40}) + _ACK),
    ("a length of 0", frame(HEADER | {"length": 0}, ("ack", {"number": 1}))),
    ("a length less than a header", frame(HEADER | {"length": 31}, ("ack", {"number": 1}))),
    ("a length past the end", frame(HEADER | {"length": 41}, ("ack", {"number": 1}))),
    ("the largest length", frame(HEADER | {"length": U16}, ("ack", {"number": 1}))),
    ("a length that cuts the body", frame(HEADER | {"length": 39}, ("ack", {"number": 1}))),
    ("a token with an entry less than it says", frame(HEADER | {"type": 6, "length": 56}) + _ONE),
    ("a token cut in its entry", frame(HEADER | {"type": 6, "length": 75}) + _ONE + bytes(19)),
    (
        "a token with a range less than it says",
        frame(HEADER, ("token", _token(members=1, ranges=1)), ("entry", {})),
    ),
    (
        "a want with a lack less than it says",
        frame(HEADER, ("want", {"lacks": 2}), ("lack", {"count": 1, "member": 1})),
    ),
    (
        "a vote with a standing less than it says",
        frame(HEADER, ("vote", _vote(standings=2)), ("standing", {"channel": 1})),
    ),
    (
        "a list with a member less than it says",
        frame(
            HEADER,
            ("view", _installed(members=2)),
            ("view_value", {}),
            ("view_member", {"mac": MAC[0], "name": b"h1"}),
        ),
    ),
)
