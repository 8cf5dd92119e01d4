# SPDX-License-Identifier: Apache-2.0
"""What a measurement of the LAN is taken to mean."""

from __future__ import annotations

from typing import Any

import pytest

from nicps.doctor.network import findings, table, tags

RATES = (3e6, 30e6, 1e9, None)


def report(received: list[float | None], **host: Any) -> dict[str, Any]:
    """A thousand frames in each train, of which h2 got these."""
    offered = [rate or 1.2e9 for rate in RATES]
    trains = [
        None if count is None else {"received": count, "rate_bps": min(rate, 90e6)}
        for count, rate in zip(received, offered, strict=True)
    ]
    usual = {"name": "h2", "mac": "02:00:00:00:00:02", "answers": 20, "trains": trains}
    usual |= {"round_trip_us": {"min": 90.0, "median": 120.0, "max": 1900.0}}
    return {
        "name": "h1",
        "iface": "eth7",
        "destination": "ff:ff:ff:ff:ff:ff",
        "questions": 20,
        "trains": [
            {"rate_bps": rate, "sent": 1000, "offered_bps": bps}
            for rate, bps in zip(RATES, offered, strict=True)
        ],
        "hosts": [usual | host],
    }


ALL = [1000, 1000, 1000, 1000]


def test_a_good_lan() -> None:
    assert findings(report([1000, 999, 997, 996])) == []
    assert "warn" not in table(report(ALL))


@pytest.mark.parametrize(
    ("received", "host", "found", "mend"),
    [
        (
            [1000, 1000, 90, 75],
            {},
            "h2 loses 92.5% above 30 Mbit/s, and gets 90 Mbit/s",
            "--multicast",
        ),
        ([990, 1000, 1000, 1000], {}, "h2 loses 1.0%, at 3 Mbit/s already", "cable"),
        ([0, 0, 0, 0], {}, "h2 gets no frame of 1502 bytes, but small ones", "MTU"),
        ([2000, 2000, 2000, 2000], {}, "h2 gets frames twice", "spanning tree"),
        ([None, 1000, 1000, 1000], {}, "did not tell of 1 trains", "overloaded"),
        (ALL, {"answers": 15}, "h2 answered 15 of 20 questions", "overloaded"),
        (ALL, {"round_trip_us": {"min": 1, "median": 7300, "max": 9000}}, "takes 7.30 ms", "load"),
    ],
)
def test_what_is_wrong(
    received: list[float | None], host: dict[str, Any], found: str, mend: str
) -> None:
    """Each is one finding with one line of advice, and stands below the table."""
    made = report(received, **host)
    (finding,) = findings(made)
    assert found in finding.found
    assert mend in finding.mend
    assert finding.found in table(made)
    assert f"-> {finding.mend}" in table(made)
    assert "\n" not in finding.found + finding.mend


def test_loss_from_the_first_train_that_is_known() -> None:
    """Nothing is said of a rate of which nobody has told."""
    told, lost = findings(report([None, 990, 1000, 1000]))
    assert "did not tell of 1 trains" in told.found
    assert lost.found == "h2 loses 1.0%, at 30 Mbit/s already"
    _, lost = findings(report([1000, None, 90, 75]))
    assert lost.found.startswith("h2 loses 92.5% above 3 Mbit/s, ")


def test_multicast_is_throttled_too() -> None:
    made = report([1000, 1000, 90, 75]) | {"destination": "03:6e:69:63:70:73"}
    (finding,) = findings(made)
    assert "throttles multicast too" in finding.mend
    assert "--multicast" not in finding.mend


def test_a_slow_sender() -> None:
    made = report(ALL)
    for train in made["trains"]:
        train["offered_bps"] = 9.5e6
    (finding,) = findings(made)
    assert finding.found == "h1 sends at most 9.5 Mbit/s"
    assert "ethtool eth7" in finding.mend


def test_the_table_is_aligned() -> None:
    made = report([1000, None, 0, 1000])
    made["hosts"].append(made["hosts"][0] | {"name": "a-longer-name", "round_trip_us": None})
    _, heads, one, other, *_ = table(made).splitlines()
    assert len({len(line) for line in (heads, one, other)}) == 1
    assert " ".join(one.split()) == "h2 0.0% ? 100.0% 0.0% 0.09 ms 0.12 ms 1.90 ms 90 Mbit/s"
    assert other.split()[5:8] == ["?", "?", "?"]


@pytest.mark.parametrize(
    ("seen", "lines"),
    [
        ({"received": 90, "tagged": 90}, ["arrive at h2", "--tags` can be used"]),
        ({"received": 90, "tagged": 0}, ["are taken off on the way to h2", "--tags` can be used"]),
        ({"received": 0, "tagged": 0}, ["do not arrive at h2", "leave out `nicps join --tags`"]),
        (None, ["nothing is known"]),
    ],
)
def test_where_tags_arrive(seen: dict[str, int] | None, lines: list[str]) -> None:
    """That is no fault, and no advice where a host has not told."""
    made = report(ALL, tags=seen)
    assert findings(made) == []
    found = tags(made)
    assert len(found) == len(lines)
    assert all(text in line for text, line in zip(lines, found, strict=True)), found
    assert "\n".join(found) in table(made)


def test_tags_of_several_hosts() -> None:
    """One drops them: then no host should send them. One has not told: nothing is advised."""
    made = report(ALL, tags={"received": 9, "tagged": 9})
    made["hosts"] += report(ALL, name="h3", tags={"received": 0, "tagged": 0})["hosts"]
    assert tags(made)[0] == "tags  arrive at h2"
    assert "leave out" in tags(made)[-1]
    made["hosts"][1]["tags"] = None
    assert tags(made) == ["tags  arrive at h2"]
