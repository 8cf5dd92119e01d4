# SPDX-License-Identifier: Apache-2.0
"""The result of a measurement of the LAN (`nicps doctor --network`): a table, and what to change.

The agent measures (docs/socket.md, `probe`); nothing here touches the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nicps.wire import BROADCAST, FRAGMENT_HEADER_BYTES, LEAST_MTU, PAYLOAD_BYTES, mac_text

#: The part of a train that may be lost: repairs cost little up to here.
LOSS = 0.005
#: A round trip between two agents, idle hosts and one switch: about 0.2 ms.
ROUND_TRIP_US = 2000.0
#: Below this rate a LAN is not suitable for gradients.
LEAST_BPS = 50e6
_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (0.0, "bit/s"))
_FRAME_BYTES = 14 + FRAGMENT_HEADER_BYTES + PAYLOAD_BYTES


@dataclass(frozen=True)
class Finding:
    """A fault, and the advice."""

    found: str
    mend: str


def loss(train: Mapping[str, Any], seen: Mapping[str, Any] | None) -> float | None:
    """Part of a train that did not arrive, 0 to 1, below 0 if more arrived than was sent; None without an answer."""
    if seen is None or not train["sent"]:
        return None
    return 1.0 - float(seen["received"]) / float(train["sent"])


def findings(report: Mapping[str, Any]) -> list[Finding]:
    """The changes to make, host by host."""
    found = [finding for host in report["hosts"] for finding in _of_host(report, host)]
    fastest = max(train["offered_bps"] for train in report["trains"])
    if fastest < LEAST_BPS:
        text = f"{report['name']} sends at most {rate(fastest)}"
        found.append(Finding(text, f"look at the link's speed: ethtool {report['iface']}"))
    return found


def _of_host(report: Mapping[str, Any], host: Mapping[str, Any]) -> Iterator[Finding]:
    name, questions = host["name"], report["questions"]
    lost = [loss(*pair) for pair in zip(report["trains"], host["trains"], strict=True)]
    known = [share for share in lost if share is not None]
    if len(known) < len(lost) or host["answers"] < 0.95 * questions:
        text = f"{name} answered {host['answers']} of {questions} questions"
        if len(known) < len(lost):
            text += f", and did not tell of {len(lost) - len(known)} trains"
        mend = "small frames are lost too: look at cables and ports, and whether that host is overloaded"
        yield Finding(text, mend)
    trip = host["round_trip_us"]
    if trip is not None and trip["median"] > ROUND_TRIP_US:
        yield Finding(
            f"a round trip to {name} takes {_us(trip['median'])}",
            "idle hosts at one switch need 0.2 ms: look for load, power saving and interrupt"
            " moderation (`ethtool -C IFACE rx-usecs 20`) on both, and for Wi-Fi on the way",
        )
    if not known:
        return
    if max(known) >= 1.0 and min(known) >= 1.0:
        yield Finding(
            f"{name} gets no frame of {_FRAME_BYTES} bytes, but small ones",
            f"every switch and interface on the way must pass an MTU of {LEAST_MTU}"
            f" (`ip link show {report['iface']}`)",
        )
        return
    if min(known) < -LOSS:
        yield Finding(
            f"{name} gets frames twice", "there is a loop in the LAN: turn spanning tree on"
        )
    yield from _throttled(report, host, lost)


def _throttled(
    report: Mapping[str, Any], host: Mapping[str, Any], lost: Sequence[float | None]
) -> Iterator[Finding]:
    """A fault for loss that begins at some rate, or occurs at any."""
    name, trains = host["name"], report["trains"]
    bad = [at for at, share in enumerate(lost) if share is not None and share > LOSS]
    if not bad:
        return
    at = bad[0]
    share = max(share for share in lost if share is not None)
    if all(before is None for before in lost[:at]):
        yield Finding(
            f"{name} loses {share:.1%}, at {_asked(trains[at])} already",
            "a bad cable or port, or a half-duplex link (`ethtool -S`): repairs will cost time",
        )
        return
    best = max((seen["rate_bps"] for seen in host["trains"] if seen is not None), default=0.0)
    good = max(before for before in range(at) if lost[before] is not None)
    text = f"{name} loses {share:.1%} above {_asked(trains[good])}, and gets {rate(best)} at most"
    if report["destination"] == mac_text(BROADCAST):
        mend = (
            "a switch throttles broadcasts (storm control): turn that off for these ports,"
            " or use `nicps join --multicast` on all hosts"
        )
    else:
        mend = "a switch throttles multicast too (storm control): turn that off for these ports"
    yield Finding(text, f"{mend}; or its link is slower (`ethtool`)")


def table(report: Mapping[str, Any]) -> str:
    """A line a host: the loss of each train, round trips, and the highest rate that arrived."""
    trains = report["trains"]
    heads = ["HOST", *map(_asked, trains), "ROUND TRIP MIN", "MEDIAN", "MAX", "RECEIVES"]
    rows = [heads]
    for host in report["hosts"]:
        lost = [loss(*pair) for pair in zip(trains, host["trains"], strict=True)]
        trip = host["round_trip_us"] or {}
        best = max((seen["rate_bps"] for seen in host["trains"] if seen is not None), default=0.0)
        rows.append(
            [
                host["name"],
                *("?" if share is None else f"{max(share, 0.0):.1%}" for share in lost),
                *(_us(trip[name]) if trip else "?" for name in ("min", "median", "max")),
                rate(best),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"frames of {report['name']}, {report['iface']}, to {report['destination']}: what is lost at"
    ]
    for row in rows:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *figures]))
    lines += ["", *tags(report)]
    for finding in findings(report):
        lines += ["", f"warn  {finding.found}", f"      -> {finding.mend}"]
    return "\n".join(lines)


def tags(report: Mapping[str, Any]) -> list[str]:
    """Where frames with an 802.1p tag arrive, and what follows for `nicps join --tags`."""
    by_host = {host["name"]: host.get("tags") for host in report["hosts"]}
    known = {name: seen for name, seen in by_host.items() if seen is not None}
    lost = [name for name, seen in known.items() if not seen["received"]]
    bare = [name for name, seen in known.items() if seen["received"] and not seen["tagged"]]
    whole = [name for name, seen in known.items() if seen["tagged"]]
    lines = []
    if whole:
        lines.append(f"tags  arrive at {', '.join(whole)}")
    if bare:
        lines.append(f"tags  are taken off on the way to {', '.join(bare)}, or by the NIC there")
    if lost:
        lines.append(f"tags  frames with one do not arrive at {', '.join(lost)}")
        lines.append("      -> a switch drops frames with VID 0: leave out `nicps join --tags`")
    elif known and len(known) == len(by_host):
        lines.append(
            "      -> `nicps join --tags` can be used, where switches heed 802.1p priorities"
        )
    return lines or ["tags  nothing is known of frames with an 802.1p tag"]


def _asked(train: Mapping[str, Any]) -> str:
    return rate(train["rate_bps"]) if train["rate_bps"] else "all it can"


def rate(bps: float) -> str:
    """`940 Mbit/s`."""
    scale, unit = next(pair for pair in _UNITS if bps >= pair[0])
    return f"{bps / (scale or 1.0):.3g} {unit}"


def _us(value: float) -> str:
    return f"{value / 1000:.2f} ms"
