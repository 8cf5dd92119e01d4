# SPDX-License-Identifier: Apache-2.0
"""report.html: made of a run's records alone, whole, and loading nothing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from trainer import JobError
from trainer.__main__ import main
from trainer.clocks import Clock, clock_shifts
from trainer.events import KINDS, away
from trainer.figures import MOMENTS, SECONDS
from trainer.report import write_report
from trainer.rundata import read
from trainer.svg import chart, decades, smooth, thin, ticks


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, hosts: int = 3, rounds: int = 40) -> Path:
    """A run whose hosts' clocks are hours apart: every round lasts 0.1 s, host k offers at 0.05 k."""
    names = [f"h{k}" for k in range(hosts, 0, -1)]  # not sorted: h3 is node 1
    for number, name in enumerate(names, 1):
        (folder / name).mkdir(parents=True)
        clock = 5000.0 * number
        rows, token = [], []
        for r in range(1, rounds + 1):
            begin = clock + r * 0.1
            test = r % 20 == 0
            times = {
                "t_start": begin,
                "t_offer": begin + 0.02 * number,
                "t_commit": begin + 0.09,
                "t_end": begin + 0.095,
            }
            row = {"phase": "test" if test else "train", "round": r, "view": 1, "samples": 30}
            row |= {"seconds_compute": 0.05, "seconds_wait": 0.04, "seconds_network": 0.005}
            row |= times | {"weights_sha256": "0"}
            if test:
                row |= {"accuracy": r / 100, "loss": None}
            else:
                counted = {str(k): 10 for k in range(1, hosts + 1) if (k, r) != (2, 3)}
                row |= {"loss": 2 / r, "own_samples": 10, "counted": counted}
            rows.append(row)
            kind = ("hold", "send", "repair")[r % 3]
            token.append({"t0": begin + 0.07, "t1": begin + 0.08, "kind": kind, "round": r})
        write_lines(folder / name / "metrics.jsonl", rows)
        write_lines(folder / name / "timeline.jsonl", token)
        agent = {"mac": "02:00:00:00:00:01", "xdp_mode": "native", "fragments_added": 1234}
        (folder / name / "agent.json").write_text(json.dumps(agent))
    result = {
        "members": names,
        "data": "<digits>",
        "seconds": 4.2,
        "weights_identical": True,
        "fragments_added": 3702,
        "settings": {"batch": 30},
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_clocks_are_laid_over_each_other_at_the_commits(tmp_path: Path) -> None:
    run = read(make_run(tmp_path))
    assert [host.name for host in run.hosts] == ["h3", "h2", "h1"]
    for host in run.hosts:
        assert host.rounds[0]["t_commit"] == pytest.approx(0.09)
        assert host.token[0]["t0"] == pytest.approx(0.07)
    assert run.seconds == pytest.approx(4.0, abs=0.01)
    assert run.losses[0] == {"round": 1, "loss": 2.0}
    assert [test["accuracy"] for test in run.tests] == [0.2, 0.4]


def test_a_host_that_sees_commits_late_is_not_taken_for_one_with_another_clock() -> None:
    def host(clock: float, late: float, wait: float) -> Clock:
        return Clock({r: clock + r + (late if r % 8 else 0) for r in range(80)}, 80 * wait)

    slow, fast = host(0, 0.08, 0), host(0, 0, 1)
    assert clock_shifts([slow, fast]) == [0, 0]
    slow = host(3000, 0.08, 0)
    assert clock_shifts([slow, fast]) == pytest.approx([3000, 0])


def test_a_clock_that_shares_rounds_with_another_but_the_measure() -> None:
    """A host that was there at the beginning only, and the one that waited most came late."""
    late, always = (
        Clock({r: 0.1 * r for r in range(50, 60)}, 9),
        Clock({r: 7 + 0.1 * r for r in range(60)}),
    )
    early, alone = Clock({r: 500 + 0.1 * r for r in range(9)}), Clock({90: 1.0})
    shifts = clock_shifts([early, late, alone, always])
    assert shifts[2] is None
    assert [shifts[k] for k in (0, 1, 3)] == pytest.approx([500, 0, 7])


def test_the_report_says_which_branches_are_in_which_set(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert "Branches:" not in write_report(folder).read_text()
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"branches": "set 1 has <9>"}))
    assert "<p>Branches: set 1 has &lt;9&gt;</p>" in write_report(folder).read_text()


def test_the_report_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    assert not re.search(r"(src|href)=|@import|url\(|<script|https?:", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 6  # loss, accuracy, a mark in the legend, the whole run, two windows
    for picture in pictures:
        ET.fromstring(picture)
    for needed in ("40.00%", "&lt;digits&gt;", "h1", "identical", "3,702", "batch=30", "37 of 38"):
        assert needed in page, needed
    for kind in ("compute", "wait", "send", "hold", "repair", "dropped", "testing"):
        assert f'<rect class="{kind}"' in page, kind
    assert list(tmp_path.glob("*.part")) == []


def add_pushes(folder: Path) -> None:
    """h2 pushes twice a round, 10 and 30 ms after it began, and h1 once."""
    for name, number, often in (("h2", 2, 2), ("h1", 3, 1)):
        path = folder / name / "metrics.jsonl"
        rows = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            begin = row["t_start"]
            rows.append(row)
            for k in range(often if row["phase"] == "train" else 0):
                at = begin + 0.01 + 0.02 * k
                times = dict.fromkeys(MOMENTS, at) | {"t_start": at - 0.004}
                push = {"phase": "push", "round": row["round"], "view": 1, "weights_sha256": ""}
                push |= {"loss": 99.0, "own_samples": 10, "version": 3, "staleness": [number, 9]}
                rows.append(push | times | {"seconds_network": 0.25})
        write_lines(path, rows)


def test_versions_and_staleness_over_time(tmp_path: Path) -> None:
    """S2. Pushes are no rounds, and their losses are in those of the rounds."""
    without = read(make_run(tmp_path / "without"))
    folder = make_run(tmp_path / "with")
    add_pushes(folder)
    run = read(folder)
    assert (run.rounds, run.losses, run.tests) == (without.rounds, without.losses, without.tests)
    assert [len(host.pushes) for host in run.hosts] == [0, 76, 38]
    assert run.hosts[1].pushes[1]["t_commit"] == pytest.approx(0.03)
    assert run.hosts[2].seconds("network") == pytest.approx(40 * 0.005 + 38 * 0.25)
    page = write_report(folder).read_text()
    for needed in ("version over s", "staleness over s", "<td>76</td><td>5.50</td><td>9</td>"):
        assert needed in page, needed
    (tmp_path / "again").mkdir()
    assert "staleness" not in write_report(make_run(tmp_path / "again" / "run")).read_text()
    points = re.search(r'<polyline class="loss" points="([^"]*)"', page.split("Version</h2>")[1])
    assert points is not None
    heights = [float(point.split(",")[1]) for point in points[1].split()]
    assert len(heights) == 152  # pushes, and training rounds
    assert heights == sorted(heights, reverse=True)


def test_a_run_with_servers_and_partners(tmp_path: Path) -> None:
    """A round of the network is a synchronisation, and a host that only serves has no gradient to count."""
    folder = make_run(tmp_path / "run")
    for host in ("h3", "h2", "h1"):
        path = folder / host / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row.get("counted", {}).pop("1", None)
        write_lines(path, rows)
    result = json.loads((folder / "result.json").read_text())
    sent = {"system": "B", "server_bytes_out": 15_311_400, "partner_bytes": 15_911_400}
    ring = write_report(folder).read_text()
    assert "training rounds" in ring and "<td>0 of 38</td>" in ring and "serves" not in ring
    (folder / "result.json").write_text(json.dumps(result | sent))
    page = write_report(folder).read_text()
    assert "synchronisations" in page and "training rounds" not in page
    assert "15.3 MB" in page and "15.9 MB" in page
    assert "<td>serves</td>" in page and "<td>37 of 38</td>" in page


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rounds=5)
    (folder / "result.json").unlink()
    (folder / "h2" / "timeline.jsonl").unlink()
    with (folder / "h1" / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "rou')
    page = write_report(folder).read_text()
    assert "the run did not get to its end" in page
    assert "nothing was recorded" in page  # no test yet


def test_without_a_result_the_title_is_the_job_in_the_runs_name(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=5)
    (folder / "result.json").unlink()
    for name, title in (("20261125-000000-my-job-1-04af", "my-job-1"), ("mine", "mine")):
        folder = folder.rename(tmp_path / name)
        assert f"<h1>{title}</h1><p>{name} on " in write_report(folder).read_text()


def test_different_weights_stand_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    result = json.loads((folder / "result.json").read_text()) | {"weights_identical": False}
    (folder / "result.json").write_text(json.dumps(result))
    assert '<div class="tile bad"><b>DIFFERENT' in write_report(folder).read_text()


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match=r"holds no HOST/metrics.jsonl"):
        write_report(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == f"trainer: error: no such run: {tmp_path}/nowhere\n"


def test_ticks() -> None:
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(3, 3) == [3]
    assert decades(0.03, 2.5) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2])


def test_curves() -> None:
    points = [(float(x), 1.0) for x in range(1000)]
    assert len(thin(points, 100)) == 100
    assert smooth([(0, 2.0), (1, 4.0), (2, 6.0)], 2) == [(0, 2.0), (1, 3.0), (2, 5.0)]
    assert "nothing was recorded" in chart([], "x", "y")


def test_rounds_without_the_first_host(tmp_path: Path) -> None:
    """It was away from round 10 to 25, with a test in them; it is no reason to leave them out."""
    path = make_run(tmp_path) / "h3" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [row for row in rows if not 10 <= row["round"] <= 25])
    run = read(tmp_path)
    assert [row["round"] for row in run.rounds] == list(range(1, 41))
    assert [row["round"] for row in run.training] == [r for r in range(1, 41) if r % 20]
    assert [row["round"] for row in run.tests] == [20, 40]
    assert "Rounds 15 to 25" in write_report(tmp_path).read_text()


# ---- programs that say little


BARE = ("round", "weights_sha256")  # all that docs/socket.md demands
FIGURES = ("phase", "view", "samples", "loss", "own_samples", "counted", "accuracy", "failed")
ODD = ("x", None, True, [1], {"a": 1}, -1.5, 10**400, float("nan"))


def change_rows(folder: Path, hosts: list[str], change: Any) -> None:
    for name in hosts:
        path = folder / name / "metrics.jsonl"
        write_lines(path, [change(json.loads(line)) for line in path.read_text().splitlines()])


@pytest.mark.parametrize("hosts", [["h1"], ["h3", "h2", "h1"]])
def test_a_program_that_leaves_out_all_but_what_is_demanded(
    tmp_path: Path, hosts: list[str]
) -> None:
    folder = make_run(tmp_path)
    change_rows(folder, hosts, lambda row: {key: row[key] for key in BARE})
    page = write_report(folder).read_text()
    all_bare = len(hosts) == 3
    assert ("40.00%" in page) is not all_bare
    assert ("The whole run" in page) is not all_bare
    assert f"<b>{40 if all_bare else 38}</b><span>training rounds" in page


@pytest.mark.parametrize("figure", sorted({*MOMENTS, *SECONDS, *FIGURES}))
def test_a_figure_that_is_missing_or_odd(tmp_path: Path, figure: str) -> None:
    """Nothing but `round` is needed, and what makes no sense counts as left out."""
    folder = make_run(tmp_path)
    change_rows(folder, ["h1"], lambda row: row | {figure: ODD[row["round"] % len(ODD)]})
    assert "40.00%" in write_report(folder).read_text()
    change_rows(folder, ["h1"], lambda row: {key: row[key] for key in row if key != figure})
    assert "40.00%" in write_report(folder).read_text()


def test_rows_that_are_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    path = folder / "h1" / "metrics.jsonl"
    path.write_text('[1]\n{"round": "1"}\n{"round": -1}\n7\n\n[[[\n' + path.read_text())
    assert "37 of 38" in write_report(folder).read_text()


# ---- events, and hosts that were away


def timeline(folder: Path, name: str, *rows: dict[str, Any], file: str = "timeline.jsonl") -> None:
    """Add rows to a host's time line; times are those of its clock in `make_run`."""
    clock = {"h3": 5000.0, "h2": 10000.0, "h1": 15000.0}[name]
    with (folder / name / file).open("a") as out:
        for row in rows:
            time = clock + row.pop("at")
            out.write(json.dumps({"t0": time, "t1": time, **row}) + "\n")


def view(at: float, round_: int, number: int, *live: str, lead: str = "h3") -> dict[str, Any]:
    return {"at": at, "kind": "view", "round": round_, "view": number, "lead": lead, "live": live}


def eventful(tmp_path: Path) -> Path:
    """h3 (node 1) is away from round 10 to 25, and h2 leads meanwhile; h1 says why it is gone for round 30."""
    folder = make_run(tmp_path)
    path = folder / "h3" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(folder / "h3" / "earlier-1.1.metrics.jsonl", [r for r in rows if r["round"] < 10])
    later = [r for r in rows if r["round"] > 25]
    for row in later:  # the machine was switched off, and its clock began anew
        row.update((key, row[key] - 4999.0) for key in MOMENTS)
    write_lines(path, later)
    everybody = view(0.05, 0, 1, "h1", "h2", "h3")
    first = [dict(everybody), {"at": 0.99, "kind": "hold", "round": 9}]
    timeline(folder, "h3", *first, file="earlier-1.timeline.jsonl")
    (folder / "h3" / "timeline.jsonl").unlink()
    back = view(2.51 - 4999.0, 26, 3, "h1", "h2", "h3")
    timeline(folder, "h3", back, {"at": 3.59 - 4999.0, "kind": "send", "round": 36})
    for name in ("h1", "h2"):
        timeline(folder, name, dict(everybody), view(1.02, 10, 2, "h1", "h2", lead="h2"))
        timeline(folder, name, view(2.5, 26, 3, "h1", "h2", "h3"))
    departs = {"at": 3.0, "kind": "departs", "round": 30, "why": "h1: SIGSEGV <in> round 30"}
    timeline(folder, "h1", departs)
    timeline(folder, "h2", view(3.05, 30, 4, "h2", "h3"), view(3.4, 33, 5, "h1", "h2", "h3"))
    timeline(folder, "h2", {"at": 3.6, "kind": "differs", "round": 35, "members": ["h1"]})
    timeline(folder, "h3", {"at": 3.96, "kind": "cancelled", "round": 40, "why": "cancelled on h3"})
    timeline(folder, "h2", {"at": 3.7, "kind": "alarm", "round": 36, "why": "h9 cannot be heard"})
    timeline(
        folder, "h2", view(3.8, 37, 6, "h1", "h2", "h3"), {"at": 3.9, "kind": "new", "round": 1}
    )
    return folder


def test_each_event_is_there_once_at_its_earliest_time(tmp_path: Path) -> None:
    run = read(eventful(tmp_path))
    found = [(e.kind, e.round, e.hosts, e.view) for e in run.events if e.kind != "test"]
    assert found == [
        ("evicted", 10, ("h3",), 2),
        ("lead", 10, ("h2",), 2),
        ("lead", 26, ("h3",), 3),
        ("returned", 26, ("h3",), 3),
        ("evicted", 30, ("h1",), 4),
        ("returned", 33, ("h1",), 5),
        ("differs", 35, ("h1",), 0),
        ("alarm", 36, ("h2",), 0),
        ("view", 37, (), 6),
        ("cancelled", 40, (), 0),
    ]
    times = {e.view: e.time for e in run.events if e.kind in ("evicted", "returned")}
    assert times == pytest.approx({2: 0.92, 3: 2.4, 4: 2.95, 5: 3.3}, abs=0.011)
    assert [e.why for e in run.events if e.kind == "evicted"] == ["", "h1: SIGSEGV <in> round 30"]
    tests = [(e.round, e.why) for e in run.events if e.kind == "test"]
    assert tests == [(20, "20.00% succeeded"), (40, "40.00% succeeded")]


def test_a_host_that_came_back_shows_its_time_before_that(tmp_path: Path) -> None:
    """Each of its lives by its own clock."""
    run = read(eventful(tmp_path))
    (host,) = [host for host in run.hosts if host.name == "h3"]
    assert [row["round"] for row in host.rounds] == [*range(1, 10), *range(26, 41)]
    for row in host.rounds:
        assert row["t_commit"] == pytest.approx(0.1 * row["round"] - 0.01, abs=0.011), row["round"]
    assert [round(row["t0"], 2) for row in host.token] == pytest.approx([0.89, 3.49], abs=0.011)
    assert away(run.events, 4.0)["h3"] == [pytest.approx((0.92, 2.4), abs=0.011)]


def test_events_are_on_the_time_line_and_in_a_table(tmp_path: Path) -> None:
    page = write_report(eventful(tmp_path)).read_text()
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(picture)
    for kind, name in KINDS.items():
        assert f'class="mark {kind}"' in page and f"</svg>{name}</span>" in page, kind
    assert '<div class="tile"><b>cancelled</b>' in page and "cancelled on h3" in page
    assert re.search(r"<td>h3</td>\s*<td>evicted</td>", page), "the word of the counter"
    assert "h3 was away, 0.9 to 2.4 s" in page and '<rect class="away"' in page
    assert "h3: in the view again (round 26, view 3, 2.4" in page
    assert "<td>h1: SIGSEGV &lt;in&gt; round 30</td>" in page
    assert "h9 cannot be heard" in page


def test_a_run_without_events_says_nothing_of_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rounds=5)
    page = write_report(folder).read_text()
    assert "Events" not in page and "</svg>" in page and "not in the view" not in page


def test_programs_without_moments_are_on_the_time_line_by_their_agents(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    names = ["h3", "h2", "h1"]
    change_rows(folder, names, lambda row: {key: row[key] for key in BARE})
    for name in names:
        for r in range(1, 41):
            kind = "commit" if r % 20 else "test"
            timeline(folder, name, {"at": 0.1 * r + 0.09, "kind": kind, "round": r})
    run = read(folder)
    assert run.seconds == pytest.approx(3.9)
    assert [row["round"] for row in run.rounds if row["phase"] == "test"] == [20, 40]
    assert [event.round for event in run.events] == [20, 40]
    page = write_report(folder).read_text()
    assert "The whole run" in page and "<b>38</b><span>training rounds" in page


def test_a_hosts_number_is_not_its_place_in_the_result(tmp_path: Path) -> None:
    """Where another host has taken the lead over, that one is the first in the result."""
    folder = make_run(tmp_path)
    agent = json.loads((folder / "h1" / "agent.json").read_text())
    (folder / "h1" / "agent.json").write_text(json.dumps(agent | {"number": 2}))
    assert [host.number for host in read(folder).hosts] == [1, 2, 2]
    assert write_report(folder).read_text().count("37 of 38") == 2


def test_slow_hosts_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert "Slow:" not in write_report(folder).read_text()
    result = json.loads((folder / "result.json").read_text())
    result["slow"] = [
        {"name": "h<2", "part": 0.414, "what": "gradient"},
        {"name": None, "part": 0.25, "what": "sums"},
    ]
    (folder / "result.json").write_text(json.dumps(result))
    page = write_report(folder).read_text()
    assert "Slow: h&lt;2: training waited 41% of the time for its gradient" in page
    assert "Slow: the Linux switch: training waited 25% of the time for its sums" in page
