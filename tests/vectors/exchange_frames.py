# SPDX-License-Identifier: Apache-2.0
"""The frames of `frames.json` whose numbers are added elsewhere: of stripes, of servers, of direct calls; switches."""

from __future__ import annotations

from tests.vectors.encode import ANSWER, CHANNEL_5, COMPLETE, GOES_ON, OFFERED, lanes
from tests.vectors.frames import HEADER, U8, U16, U32, U64, Vector

STEP = {"version": 5, "number": 9, "index": 5, "fragments": 12, "width": 32, "exponent": -23}
STRIPE = {"members": 0b1011, "index": 5, "fragments": 12, "width": 32, "exponent": 3, "unit": -23}
CALL = {"call": 1 << 31, "number": 2, "size": 8, "fragments": 2, "view": 3}
FRAMES = (
    Vector(
        "contribution of 8-bit lanes, in a list of four",
        HEADER,
        (("contribution", STRIPE | {"width": 8, "exponent": -7, "unit": -57}),),
        lanes(8, {0: -128, 1439: 127}),
    ),
    Vector(
        "contribution that is not finite, the last of the largest vector",
        HEADER,
        (("contribution", STRIPE | {"index": U32 - 1, "fragments": U32, "exponent": 127}),),
        lanes(32, {}),
    ),
    Vector(
        "sum: an answer, of 16-bit lanes",
        HEADER | {"flags": ANSWER},
        (("sum", STRIPE | {"number": 9, "width": 16, "exponent": -120, "unit": -120}),),
        lanes(16, {0: -32768, 719: 32767}),
    ),
    Vector(
        "want of channel 5: an offer",
        HEADER | {"flags": OFFERED | CHANNEL_5},
        (("want", {"ready": 32, "read": 6, "unit": -128}),),
    ),
    *(
        Vector(
            f"{name} of channel 5", HEADER | {"flags": CHANNEL_5}, ((name, STRIPE),), bytes(1440)
        )
        for name in ("contribution", "sum", "ask", "lacking")
    ),
    Vector("ask", HEADER, (("ask", STRIPE | {"number": U32}),), bytes(1440)),
    Vector(
        "lacking: members 2 and 64",
        HEADER | {"flags": ANSWER},
        (("lacking", STRIPE | {"members": 1 << 63 | 2, "number": 1}),),
        bytes(1440),
    ),
    Vector(
        "contribution: to a switch, with a remainder",
        HEADER,
        (("contribution", STRIPE | {"number": 3, "behind": 255}),),
        bytes(1440),
    ),
    Vector(
        "push of 8-bit lanes, every number at its largest",
        HEADER,
        (
            (
                "push",
                {
                    "version": U32,
                    "number": U32,
                    "index": U32 - 1,
                    "fragments": U32,
                    "staleness": U32,
                }
                | {"width": 8, "exponent": -128, "reason": U8, "reserved": U8},
            ),
        ),
        lanes(8, {0: -128, 1439: 127}),
    ),
    Vector("pull, of what a worker has", HEADER, (("pull", STEP | {"version": U32}),), bytes(1440)),
    Vector(
        "held: the answer to a push",
        HEADER | {"flags": ANSWER},
        (("held", STEP | {"staleness": 3, "exponent": 22}),),
        lanes(32, {0: -(2**31), 359: 2**31 - 1}),
    ),
    Vector(
        "taken",
        HEADER | {"flags": ANSWER},
        (("taken", STEP | {"staleness": 1, "width": 16}),),
    ),
    Vector(
        "taken: a parameter is near its limits",
        HEADER | {"flags": ANSWER},
        (("taken", STEP | {"reason": 4}),),
    ),
    Vector(
        "numbers, every field at its largest",
        HEADER | {"flags": COMPLETE},
        (
            (
                "numbers",
                {"call": U32, "number": U32, "size": U16, "index": U8, "fragments": U8}
                | {"view": U32},
            ),
        ),
        bytes(range(64)),
    ),
    Vector("numbers, a long part", HEADER, (("numbers", CALL | {"size": 2880}),), bytes(1440)),
    Vector("marked", HEADER | {"flags": ANSWER}, (("marked", CALL),)),
    Vector("withdrawn", HEADER, (("withdrawn", CALL),)),
    Vector("settle", HEADER | {"view": 4}, (("settle", CALL),)),
    Vector(
        "want of a lead that has all go on",
        HEADER | {"flags": GOES_ON},
        (("want", {"read": 6, "digest": 7}),),
    ),
    Vector("switch: hello", HEADER, (("switch", {"boot": U64, "nonce": 1, "step": 1}),)),
    Vector(
        "switch: a grant, sealed",
        HEADER,
        (
            (
                "switch",
                {"boot": 1, "nonce": U64, "number": 2, "fragments": U32, "width": 8, "step": 2},
            ),
        ),
        bytes(range(256)),
    ),
    Vector(
        "switch: ready",
        HEADER,
        (
            (
                "switch",
                {
                    "boot": U64,
                    "members": U64,
                    "number": U32,
                    "fragments": 9,
                    "width": 32,
                    "step": 3,
                },
            ),
        ),
    ),
)
