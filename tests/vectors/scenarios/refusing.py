# SPDX-License-Identifier: Apache-2.0
"""What is not taken: others' frames, strangers (R4), wrong views and rounds, bad formats."""

from __future__ import annotations

from tests.vectors import encode
from tests.vectors.encode import BOUNCED
from tests.vectors.scenario import DROP, NOBODY, PASS, ROUND, TX, VIEW, Scenario, mac
from tests.vectors.scenarios.adding import ADDED, BANK

STRANGER = "02:00:00:00:00:99"


def foreign() -> Scenario:
    s = Scenario("foreign", "Frames of others pass untouched.")
    for say, ethertype, data in (
        ("IPv4", 0x0800, bytes.fromhex("4500001c00000000401166cf0a0000010a000002") + bytes(8)),
        ("ARP", 0x0806, bytes(28)),
        ("a VLAN tag before our EtherType", 0x8100, bytes.fromhex("000188b5") + bytes(40)),
        ("the EtherType beside ours", 0x88B6, encode.frame({}, ("ack", {}))),
        ("an Ethernet header and nothing else", 0x0800, b""),
    ):
        s.step(say, encode.ethernet(mac(2), data, ethertype), PASS)
    return s.ends()


def malformed() -> Scenario:
    s = Scenario(
        "malformed", "Frames of ours that are cut, or say what cannot be, are counted and dropped."
    )
    ack, _ = s.frame([("ack", {"number": 1})])
    whole = encode.frame(
        {"network": 0x0A0B0C0D, "view": VIEW, "round": ROUND, "sender": 2},
        ("fragment", {"fragments": 2, "lanes": 360, "width": 32}),
        tail=encode.lanes(32, {0: 1}),
    )
    fragment = encode.ethernet(mac(2), whole)
    s.step("nothing after the EtherType", ack[:14], DROP, "truncated")
    s.step("a header less one byte", ack[: 14 + 31], DROP, "truncated")
    for version in (0, 2, 255):
        data, of = s.frame([("ack", {})], version=version)
        s.step(f"version {version}", data, DROP, "version", of=of)
    for length in (0, 31, 41, 65535):
        data, of = s.frame([("ack", {})], length=length)
        s.step(f"length {length} in a frame of 40 bytes", data, DROP, "truncated", of=of)
    s.step("a fragment cut in its payload", fragment[:-1], DROP, "truncated")
    s.step("a fragment cut behind its header", fragment[: 14 + 48], DROP, "truncated")
    for say, length in (("one byte less", 1487), ("header only", 48), ("less than its header", 40)):
        s.fragment(
            f"a fragment whose length is too small: {say}",
            DROP,
            "truncated",
            values={0: 1},
            header={"length": length},
        )
    for say, cut, reason in (
        ("cut in its body", 32 + 39, "truncated"),
        ("cut in its entries", 32 + 40 + 59, "malformed"),
    ):
        data, _ = s.frame(
            [("token", {"generation": 4, "hop": 1, "owner": 1, "members": 3}), *[("entry", {})] * 3]
        )
        s.step(f"a token {say}", data[: 14 + cut], DROP, "truncated")
        shorter, _ = s.frame(
            [
                ("token", {"generation": 4, "hop": 1, "owner": 1, "members": 3}),
                *[("entry", {})] * 3,
            ],
            length=cut,
        )
        s.step(f"a token whose length says so: {say}", shorter, DROP, reason)
    for kind in (0, 99, 255):
        data, of = s.frame([("ack", {})], type=kind)
        s.step(f"type {kind}", data, DROP, "type", of=of)
    return s.ends()


def control() -> Scenario:
    s = Scenario(
        "control",
        "Control frames of our network go up from anybody, in any view or none.",
    )
    bodies = [
        ("call", {"nonce": 1}),
        ("answer", {"nonce": 1}),
        ("view", {"nonce": 1}),
        ("decision", {"number": 1, "phase": 2}),
        ("ack", {"number": 1}),
        ("want", {"ready": 1}),
        ("fail", {}),
        ("vote", {"ballot": 1}),
        ("leave", {}),
        ("probe", {"nonce": 1, "step": 1}),
        ("echo", {"nonce": 1}),
    ]
    for body in bodies:
        data, of = s.frame([body], source=STRANGER, sender=0, view=9, round=99)
        s.step(f"{body[0]} of a stranger", data, PASS, "control", of=of)
    for body in bodies:
        data, of = s.frame([body], source=STRANGER, network=0x0A0B0C0E)
        s.step(f"{body[0]} of another network", data, DROP, "network", of=of)
    train = {"nonce": 1, "step": 2}
    data, of = s.frame([("probe", train)], source=STRANGER, sender=0, tail=bytes(1440))
    s.step("a train's frame: counted, and of no use to the agent", data, DROP, "probed", of=of)
    data, of = s.frame([("probe", train)], length=47)
    s.step("the same, whose length says less", data, DROP, "truncated", of=of)
    s.step("cut in its body", data[: 14 + 47], DROP, "truncated")
    s.agent("no view yet", enabled=0, view=0, members=0, number=0)
    data, of = s.frame([("view", {"nonce": 1})], sender=1, view=1)
    s.step("the list, while not enabled", data, PASS, "control", of=of)
    s.fragment("a fragment, while not enabled", DROP, "disabled", values={0: 1})
    s.token("a token, while not enabled", DROP, "disabled", hop=1)
    return s.ends()


def strangers() -> Scenario:
    s = Scenario(
        "strangers", "R4: a source that is not the recorded MAC of the sender it names is ignored."
    )
    s.fragment("unknown MAC", DROP, "stranger", source=STRANGER, values={0: 1})
    s.fragment("member 3 says it is 2", DROP, "stranger", source=mac(3), values={0: 1})
    for number in (0, 4, 64, 65, 0x8002, 65535):
        s.fragment(
            f"number {number} of 3",
            DROP,
            "stranger",
            source=mac(2),
            values={0: 1},
            header={"sender": number},
        )
    s.fragment(
        "this host's own frame, come back", DROP, "echo", values={0: 1}, header={"sender": 1}
    )
    s.token("its own token, come back", DROP, "echo", hop=49, header={"sender": 1})
    s.token("a token from an unknown MAC", DROP, "stranger", hop=50, source=STRANGER)
    s.token("a token of member 3 that says it is 2", DROP, "stranger", hop=51, source=mac(3))
    s.token("a token of number 0", DROP, "stranger", hop=52, source=mac(2), header={"sender": 0})
    s.fragment("the member itself", DROP, ADDED, values={0: 1})
    s.agent("a list of one", members=1)
    s.fragment("whose number is not in the list", DROP, "stranger", values={0: 1}, index=1)
    return s.ends(
        progress=[(ROUND, 2, 1)],
        slots=[(ROUND, 0, [2])],
        accumulators=[{"bank": BANK, "block": 0, "lane": 0, "values": [1]}],
    )


def holes() -> Scenario:
    s = Scenario(
        "holes",
        "R19: who has left keeps the number; nobody has it, and the token passes it by.",
        members=5,
        left=(2, 4),
        number=3,
    )
    s.fragment("of member 2, who has left", DROP, "stranger", values={0: 1})
    s.fragment("of number 2, from no address at all", DROP, "stranger", source=NOBODY)
    s.token("its token", DROP, "stranger", hop=10, owner=3)
    s.token("from no address at all", DROP, "stranger", hop=11, owner=3, source=NOBODY)
    one = {"sender": 1}
    for owner in (2, 4):
        say = f"a token for member {owner}, who has left"
        s.token(say, DROP, "malformed", hop=12, owner=owner, header=one)
    s.token("entries of the three that are in", DROP, "malformed", hop=13, members=3, header=one)
    out = {"owner": 5, "hop": 15, "idle": 1, "header_flags": BOUNCED}
    s.token("for me: it goes on to 5", TX, "bounced", hop=14, owner=3, header=one, out=out)
    s.token("the third idle hop of three", PASS, "raised", hop=17, owner=3, idle=2, header=one)
    s.fragment("of member 5", DROP, ADDED, values={0: 1}, header={"sender": 5})
    return s.ends(
        progress=[(ROUND, 5, 1)],
        slots=[(ROUND, 0, [5])],
        accumulators=[{"bank": BANK, "block": 0, "lane": 0, "values": [1]}],
        ring=(4, 17),
        bounced=(4, 15),
        bounces=1,
    )


def no_room() -> Scenario:
    s = Scenario(
        "no-room", "Frames of stripes and of servers, for a host that has no program of either."
    )
    for name in (*encode.STRIPES, *encode.SERVERS):
        lanes = b"" if name == "taken" else bytes(1440)
        body = [(name, {"index": 1, "fragments": 2, "width": 32})]
        data, of = s.frame(body, tail=lanes)
        for_one = bytes.fromhex(mac(1).replace(":", "")) + data[6:]
        s.step(f"{name}, for all", data, DROP, "mode", of=of)
        s.step(f"{name}, for this host", for_one, DROP, "mode", of=of)
        data, of = s.frame(body, tail=lanes, source=STRANGER)
        s.step(f"{name}, from an unknown MAC", data, DROP, "mode", of=of)
        data, of = s.frame(body, tail=lanes, sender=0)
        s.step(f"{name}, of number 0", data, DROP, "mode", of=of)
        data, of = s.frame(body, tail=lanes, view=VIEW + 1)
        s.step(f"{name}, of another view", data, DROP, "mode", of=of)
        data, of = s.frame(body, tail=lanes, network=0)
        s.step(f"{name}, of another network", data, DROP, "network", of=of)
    for name in encode.DIRECT:
        lanes = bytes(64) if name == "numbers" else b""
        data, of = s.frame([(name, {"fragments": 1})], tail=lanes)
        s.step(f"{name}, before their program is loaded", data, DROP, "mode", of=of)
    data, of = s.frame([("taken", {})], type=28)
    s.step("the type behind the last one", data, DROP, "type", of=of)
    return s.ends()


def elsewhere() -> Scenario:
    s = Scenario(
        "elsewhere", "Another network, view or round: nothing is added.", round_low=7, round_high=8
    )
    s.fragment("another network", DROP, "network", values={0: 1}, header={"network": 0})
    s.token("another network's token", DROP, "network", hop=9, header={"network": 0xFFFFFFFF})
    for view in (0, VIEW - 1, VIEW + 1):
        s.fragment(f"view {view}", DROP, "view", values={0: 1}, header={"view": view})
        s.token(f"a token of view {view}", DROP, "view", hop=9, header={"view": view})
    for round_ in (0, 6, 9, 2**32 - 1):
        s.fragment(
            f"round {round_} of 7 to 8", DROP, "round", values={0: 1}, header={"round": round_}
        )
    s.fragment("round 8", DROP, ADDED, values={0: 1}, header={"round": 8})
    return s.ends(
        progress=[(8, 2, 1)],
        slots=[(8, 0, [2])],
        accumulators=[{"bank": 0, "block": 0, "lane": 0, "values": [1]}],
    )


def bad_fragments() -> Scenario:
    s = Scenario("bad-fragments", "Widths, shifts and places that cannot be.")
    for width in (1, 7, 24, 64, 255):
        s.fragment(f"width {width}", DROP, "malformed", width=width, values={0: 1})
    for width, shift in ((0, 1), (8, 51), (16, 43), (32, 27), (32, 255)):
        s.fragment(
            f"width {width}, shift {shift}", DROP, "shift", width=width, shift=shift, values={0: 1}
        )
    s.fragment("index equal to fragments", DROP, "malformed", index=2, fragments=2)
    s.fragment("no fragments at all", DROP, "malformed", index=0, fragments=0)
    s.fragment("the largest index", DROP, "malformed", index=2**32 - 1, fragments=2**32 - 1)
    for width, first in ((32, 16), (16, 8), (8, 4), (0, 32)):
        s.fragment(
            f"width {width}: first beyond four blocks",
            DROP,
            "range",
            width=width,
            index=first,
            fragments=99,
        )
    s.fragment("far beyond", DROP, "range", index=2**31, fragments=2**32 - 1)
    return s.ends()


def bad_tokens() -> Scenario:
    s = Scenario("bad-tokens", "Tokens that do not fit the view; none counts as seen.")
    s.token("owner 0", DROP, "malformed", hop=90, owner=0)
    s.token("owner 4 of 3", DROP, "malformed", hop=91, owner=4)
    s.token("owner 65535", DROP, "malformed", hop=92, owner=65535)
    s.token("it says 4 members, and has 3 entries", DROP, "malformed", hop=93, members=4)
    s.token("it says 2 members, and has 3 entries", DROP, "malformed", hop=94, members=2)
    s.token("no members", DROP, "malformed", hop=95, members=0)
    s.token("it says a range, and has none", DROP, "malformed", hop=96, ranges_said=1)
    s.token(
        "it has a range, and says none",
        DROP,
        "malformed",
        hop=97,
        ranges=[{"first": 0, "count": 1, "sender": 2}],
        ranges_said=0,
    )
    s.token("a sound one, with a lower hop", PASS, "raised", hop=1, state=1)
    return s.ends(ring=(4, 1))


SCENARIOS = (
    *(foreign, malformed, control, strangers, holes, no_room, elsewhere),
    *(bad_fragments, bad_tokens),
)
