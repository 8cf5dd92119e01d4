# SPDX-License-Identifier: Apache-2.0
"""The report of a job with channels: whose offers a round waited for, and compute beside transfer."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_trainer_report import change_rows, make_run, write_lines
from trainer.channels import Flow, bars, behind, computing, flows_of, read_rounds
from trainer.figures import read_row
from trainer.report import write_report
from trainer.rundata import Run, read

NAMES = {1: "h2", 2: "h1"}


def flow(urgency: int, listed: float, whole: float, round_: int = 1) -> Flow:
    times = listed - 0.5, listed, whole, whole + 0.25
    return Flow(urgency, urgency, round_, 0, 1, *times, 2, 1)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def channelled(folder: Path) -> Path:
    """Two hosts, 30 steps. Channel 1 has two rounds a step, and h1 (member 2) always offers last."""
    make_run(folder, hosts=2, rounds=30)
    for number, name in NAMES.items():

        def change(row: dict[str, Any]) -> dict[str, Any]:
            at = row["t_offer"]
            if row["phase"] == "train":
                waits = [[at + 0.01, at + 0.02, "<layer>", 1], [at + 0.022, at + 0.025, "", None]]
                row |= {"waits": waits, "updates": [[at + 0.02, at + 0.022]]}
            return row

        change_rows(folder, [name], change)
        path = folder / name / "timeline.jsonl"
        rows, begin = lines(path), 5000.0 * number
        for step in range(1, 31):
            t0, late = begin + step * 0.1 + 0.02, 0.0 if number == 2 else 2.0
            bulk = {"t0": t0, "t1": t0 + 0.06, "kind": "rounds", "round": step, "urgency": 0}
            rows.append(bulk | {"rounds": [[0.0, late, 50.0, 60.0, 2, 1]]})
            urgent = bulk | {"round": 2 * step, "channel": 1, "urgency": 1}
            two = [[0.0, late, 20.0, 21.0, 2, 1], [22.0, 24.0, None, 30.0, None, None]]
            rows.append(urgent | {"rounds": two})
        write_lines(path, rows)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read(channelled(tmp_path))


def test_a_rounds_moments_are_on_the_clock_of_the_run(run: Run) -> None:
    """The clocks are laid over the agents' commits: a program sees a step's end when its own forward pass ends."""
    (one, other) = run.hosts
    assert [host.name for host in run.hosts] == ["h2", "h1"]
    for row, same in zip(one.flows, other.flows, strict=True):
        assert row["t0"] == pytest.approx(same["t0"], abs=1e-6)
    first, second = flows_of(one.flows[1])
    assert (first.channel, first.urgency, first.round, first.place, first.places) == (1, 1, 2, 0, 2)
    assert first.offered == pytest.approx(0.02) and first.listed == pytest.approx(0.022)
    assert first.whole == pytest.approx(0.04) and first.committed == pytest.approx(0.041)
    assert (first.last, first.mark) == (2, 1) and (second.last, second.mark) == (None, None)
    assert second.round == 3 and second.whole is None
    assert one.timed[0]["waits"][0][0] == pytest.approx(one.timed[0]["t_offer"] + 0.01)


def test_less_urgent_sums_are_behind_those_of_another_channel() -> None:
    flows = [flow(0, 1.0, 9.0), flow(2, 2.0, 4.0), flow(1, 3.0, 5.0), flow(2, 7.0, 8.0, 2)]
    later = behind(flows)
    assert later[id(flows[0])] == [(2.0, 5.0), (7.0, 8.0)]
    assert later[id(flows[2])] == [(3.0, 4.0)] and id(flows[1]) not in later
    assert not behind([flow(1, 1.0, 3.0), flow(1, 2.0, 4.0)])


def test_the_bars_of_a_round_say_who_was_waited_for() -> None:
    found = list(bars("h1", flow(3, 1.0, 2.0, 7), [(1.25, 1.5)], {1: "h3", 2: "h4"}))
    assert [(kind, round(last - first, 3)) for first, last, kind, _ in found] == [
        ("offers", 0.5),
        ("flow", 1.0),
        ("behind", 0.25),
        ("marks", 0.25),
    ]
    hints = [hint for *_, hint in found]
    assert hints[0] == (
        "h1, channel 3, round 7 (1 of 1): waited 500.0 ms for offers, the last of h4"
    )
    assert hints[3].endswith("sums were here, waited 250.0 ms for h3")
    unknown = Flow(0, 0, 1, 0, 1, None, None, None, 5.0, None, None)
    assert list(bars("h1", unknown, (), {})) == []


def test_forward_beside_the_exchange_is_computing_but_for_its_waits() -> None:
    times = {"t_start": 0.0, "t_offer": 1.0, "t_commit": 2.0, "t_end": 2.5}
    waits = [[1.25, 1.5, "a", 0], [1.75, 2.0, "", None]]
    row = read_row({"round": 1, **times, "waits": waits, "updates": [[1.5, 1.75]]})
    assert row is not None
    assert sum(last - first for first, last in computing(row)) == pytest.approx(2.0)
    plain = read_row({"round": 1, **times})
    assert plain is not None and plain["waits"] is None and plain["updates"] == []
    assert sum(last - first for first, last in computing(plain)) == 1.5


@pytest.mark.parametrize(
    "waits",
    [7, [7], [[1.5, 1.25, "a", 0]], [[1.5, 1.6, "a"]], [[1.5, 1.6, "a", 0], [1.4, 1.7, "a", 0]]],
)
def test_waits_that_cannot_be_are_left_out(waits: Any) -> None:
    times = {"t_start": 0.0, "t_offer": 1.0, "t_commit": 2.0, "t_end": 2.5}
    row = read_row({"round": 1, **times, "waits": waits, "updates": []})
    assert row is not None and row["waits"] is None


@pytest.mark.parametrize(
    "rounds", [None, [7], [[0.0, 1.0]], [[0.0, 1.0, 2.0, None, 1, 1]], [["a", 1, 2, 3, 1, 1]]]
)
def test_rows_of_channels_that_cannot_be_read(rounds: Any) -> None:
    assert not read_rounds({"t0": 0.0, "urgency": 1, "rounds": rounds})
    assert not read_rounds({"t0": 0.0, "rounds": []})
    assert read_rounds({"t0": 0.0, "urgency": 1, "rounds": [[0.0, None, None, 3.0, None, 1, 9]]})


def test_the_report_has_a_row_a_channel(run: Run) -> None:
    """In each host's lane of a window, the most urgent one first; and tables of what was waited for."""
    page = write_report(run.folder).read_text()
    body = page[page.index("<main>") : page.index("</main>") + 7]
    ET.fromstring(body.replace("&nbsp;", " "))
    (windows,) = re.findall(r"<h3>Rounds 1 to 10,.*?</svg>", body)
    labels = re.findall(r">(channel \d|h\d)</text>", windows)
    assert labels == ["h2", "channel 1", "channel 0", "h1", "channel 1", "channel 0"]
    for kind in ("forward", "wait", "update", "offers", "flow", "behind", "marks"):
        assert f'<rect class="{kind}"' in windows, kind
    assert "h2, round 1: waited 10.0 ms in front of &lt;layer&gt;, channel 1" in windows
    assert "h2, channel 0, round 1 (1 of 1): waited 2.0 ms for offers, the last of h1" in windows
    section = page[page.index("<h2>Channels") :]
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", section[: section.index("</section>")])
    cells = [re.sub("<.*?>", "", row.replace("</td><td>", "|")).split("|") for row in rows]
    assert cells[0] == ["1", "1", "120", "2.0 ms", "12.0 ms", "0.0 ms", "1.0 ms", "h1 100%"]
    assert cells[1] == ["0", "0", "60", "1.0 ms", "49.0 ms", "25.0 ms", "10.0 ms", "h1 100%"]
    assert cells[2][:4] == ["h2", "29", "13.0 ms", "2.0 ms"]
    assert cells[2][4] == "&lt;layer&gt; (channel 1) 10.0 ms, the end of forward 3.0 ms"


def test_a_job_without_channels_has_nothing_of_them(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    body = page[page.index("<main>") :]
    assert (
        "Channels</h2>" not in body and "channel 0" not in body and "next forward pass" not in body
    )
