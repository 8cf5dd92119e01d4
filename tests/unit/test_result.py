# SPDX-License-Identifier: Apache-2.0
"""What a run comes to, whatever training programs have written into its records."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from nicps.agent.result import summarise
from nicps.errors import JobFailed
from nicps.job.actions import CloseJob, OpenJob
from nicps.job.slow_work import KeepRecords, MakeResult
from tests.rooms import Rooms

LAST = 9
HOSTS = ("h1", "h2", "h3")
FACTS = {
    "rounds": 8,
    "rounds_before": 5,
    "xdp_mode": "native",
    "fragments_added": 5,
    "fragments_expected": 5,
    "fragments_sent_again": 1,
    "sums_asked_again": 0,
    "token_turns": 30,
}


def sha256(round_: int, odd: str = "") -> str:
    return hashlib.sha256(f"{round_}{odd}".encode()).hexdigest()


def row(round_: int, odd: str = "", **more: Any) -> dict[str, Any]:
    return {"round": round_, "view": 1, "weights_sha256": sha256(round_, odd), **more}


class Run:
    """A run's folder. All hosts have had the same weights after rounds 2 to 9."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in HOSTS:
            (folder / name).mkdir()
            self.facts(name)
            self.rows(name, *(row(k) for k in range(2, LAST + 1)))
        self.put("h1", "final.json", {"accuracy": 0.75})

    def put(self, name: str, what: str, value: Any) -> None:
        (self.folder / name / what).write_bytes(orjson.dumps(value))

    def facts(self, name: str, **more: Any) -> None:
        self.put(name, "agent.json", FACTS | more)

    def rows(self, name: str, *rows: Any) -> None:
        lines = [line if isinstance(line, bytes) else orjson.dumps(line) + b"\n" for line in rows]
        (self.folder / name / "metrics.jsonl").write_bytes(b"".join(lines))

    @property
    def result(self) -> dict[str, Any]:
        return summarise(self.folder, HOSTS, LAST)

    @property
    def error(self) -> str:
        with pytest.raises(JobFailed) as raised:
            summarise(self.folder, HOSTS, LAST)
        return str(raised.value)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run(run: Run) -> None:
    assert run.result == {
        "hosts": 3,
        "members": ["h1", "h2", "h3"],
        "rounds": 8,
        "trained_rounds": 13,
        "test_accuracy": 0.75,
        "weights_identical": True,
        "differed": [],
        "weights_sha256": sha256(LAST),
        "xdp_mode": "native",
        "fragments_added": 15,
        "fragments_sent_again": 3,
        "sums_asked_again": 0,
        "token_turns": 90,
        "exchanges": {},
        "slow": [],
        "channels": 1,
        "step_seconds": None,
        "wait_seconds": None,
        "predicted_seconds": None,
        "system": "R",
    }


def test_what_made_the_sums_is_said_by_the_host_that_was_there_longest(run: Run) -> None:
    run.facts("h1", rounds=3, exchanges={"stripes": 3})
    run.facts("h2", exchanges={"stripes": 5, "broadcast": 3})
    assert run.result["exchanges"] == {"stripes": 5, "broadcast": 3}


def test_slow_hosts_are_named_from_what_all_have_measured(run: Run) -> None:
    """A Linux switch has no name. Hosts of an older nicps have measured nothing."""
    waited = [
        {"name": "h2", "what": "gradient", "seconds": 4.0},
        {"name": "h2", "what": "mark", "seconds": 1.0},
        {"name": "h3", "what": "gradient", "seconds": 0.5},
        {"name": None, "what": "sums", "seconds": 3.0},
    ]
    run.facts("h1", waited={"seconds": 10.0, "for": waited})
    run.facts("h2", waited={"seconds": 10.0, "for": waited[:2]})
    assert run.result["slow"] == [{"name": "h2", "part": 0.5, "what": "gradient"}]
    run.facts("h2", waited={"seconds": 10.0, "for": [{**waited[3], "seconds": 9.0}]})
    assert run.result["slow"] == [
        {"name": None, "part": 0.6, "what": "sums"},
        {"name": "h2", "part": 0.25, "what": "gradient"},
    ]


SERVED = {"system": "S", "pushes": 0, "synchronisations": 3, "versions": 0, "staleness": [0, 0, 0]}


def test_a_run_with_servers(run: Run) -> None:
    """S2, S4. A push leaves a row without weights, which nobody else has."""
    run.facts("h1", served=SERVED | {"versions": 23})
    run.facts("h2", served=SERVED | {"pushes": 12, "staleness": [12, 15, 2]})
    run.facts("h3", served=SERVED | {"pushes": 8, "staleness": [8, 25, 7]})
    pushes = [row(9) | {"phase": "push", "weights_sha256": ""}] * 4
    run.rows("h2", *(row(k) for k in range(2, 9)), *pushes, row(9))
    run.rows("h3", *(row(k) for k in range(2, 10)), *pushes)
    served = {
        "system": "S",
        "versions": 23,
        "staleness_mean": 2.0,
        "staleness_max": 7,
        "forced_synchronisations": 3,
    }
    assert run.result.items() >= served.items()
    assert run.result["weights_identical"]
    assert run.result["weights_sha256"] == sha256(LAST)


def test_steps_are_those_of_a_worker_where_the_first_host_only_serves(run: Run) -> None:
    steps = {"step_seconds": 0.25, "wait_seconds": 0.125}
    run.put("h3", "final.json", {"accuracy": 0.5, "channels": 1} | steps)
    assert run.result.items() >= {"step_seconds": None, "test_accuracy": 0.75}.items(), "a ring"
    for name in HOSTS:
        run.facts(name, served=SERVED)
    assert run.result.items() >= (steps | {"test_accuracy": 0.75}).items()


def test_a_run_with_partners(run: Run) -> None:
    """B: frames with parameters, of 1,510 bytes each: those of servers, and those that workers pass on."""
    of = SERVED | {"system": "B"}
    run.facts("h1", served=of | {"pulled": 100, "passed_on": 0})
    run.facts("h2", served=of | {"pulled": 0, "passed_on": 40})
    run.facts("h3", served=of | {"pulled": 20, "passed_on": 61})
    assert (
        run.result.items()
        >= {"system": "B", "server_bytes_out": 181_200, "partner_bytes": 152_510}.items()
    )


def test_frames_with_parameters_that_an_agent_has_not_counted(run: Run) -> None:
    """An agent that has come to the job at its end, or that of an older version, tells none."""
    of = SERVED | {"system": "B"}
    run.facts("h1", served=of | {"pulled": 100, "passed_on": 0})
    run.facts("h2", served=of | {"pulled": 0, "passed_on": 40})
    run.facts("h3", served={key: value for key, value in of.items() if key != "versions"})
    sent = {"server_bytes_out": 151_000, "partner_bytes": 60_400}
    assert run.result.items() >= sent.items()


def test_a_run_in_which_nothing_was_pushed(run: Run) -> None:
    """T = 1."""
    for name in HOSTS:
        run.facts(name, served=SERVED)
    assert (run.result["staleness_mean"], run.result["staleness_max"]) == (None, None)


def test_pushes_leave_more_rows_than_rounds_do(run: Run) -> None:
    push = row(9) | {"weights_sha256": ""}
    run.rows("h2", *(row(k) for k in range(2, 10)), *[push] * 1200)
    assert "metrics.jsonl: there are more than 1104 rows" in run.error
    run.facts("h2", served=SERVED | {"pushes": 1200})
    for name in ("h1", "h3"):
        run.facts(name, served=SERVED)
    assert run.result["weights_identical"]


def test_who_has_come_late_has_the_same(run: Run) -> None:
    run.rows("h2", row(8), row(9))
    assert run.result["weights_identical"]


@pytest.mark.parametrize("late", [10, 1 << 62])
def test_who_went_on_without_the_others(run: Run, late: int) -> None:
    """Of two hosts that are cut apart, and may go on alone, one was ahead of the end that the other has led to."""
    run.rows("h2", *(row(k) for k in range(2, LAST + 1)), row(late))
    assert not run.result["weights_identical"]
    assert run.result["weights_sha256"] == sha256(LAST)


@pytest.mark.parametrize("other", [row(5, "other"), row(9, "other")])
def test_one_round_that_differs(run: Run, other: dict[str, Any]) -> None:
    run.rows("h3", *(other if k == other["round"] else row(k) for k in range(2, LAST + 1)))
    assert not run.result["weights_identical"]


def test_states_are_compared_where_weights_were_not_hashed(run: Run) -> None:
    """As with large models; whoever has no digest of its state is compared by the weights alone."""
    run.rows("h2", *(row(k, digest=f"{k}") for k in range(2, LAST + 1)))
    run.rows("h3", *(row(k, digest=f"{k}") | {"weights_sha256": ""} for k in (3, 4)), row(9))
    assert run.result.items() >= {"weights_identical": True, "weights_sha256": sha256(9)}.items()
    run.rows("h3", row(3, digest="other") | {"weights_sha256": ""}, row(9))
    assert not run.result["weights_identical"]


def test_the_hash_in_the_result_is_of_the_last_round(run: Run) -> None:
    """Whichever host has computed it; without one there is none, rather than that of a round before."""
    unhashed = [row(k, digest=f"{k}") | {"weights_sha256": ""} for k in (8, 9)]
    run.rows("h1", row(7), *unhashed)
    assert run.result.items() >= {"weights_identical": True, "weights_sha256": sha256(9)}.items()
    for name in ("h2", "h3"):
        run.rows(name, row(7), *unhashed)
    assert run.result.items() >= {"weights_identical": True, "weights_sha256": None}.items()


def test_two_that_differ_where_the_first_was_not_there(run: Run) -> None:
    run.rows("h1", *(row(k) for k in range(6, LAST + 1)))
    run.rows("h3", row(3, "other"), row(9))
    assert not run.result["weights_identical"]


def test_the_last_round_must_be_everybodys(run: Run) -> None:
    run.rows("h3", *(row(k) for k in range(2, LAST)))
    assert not run.result["weights_identical"]


def test_a_round_that_was_run_again_counts_as_it_was_last(run: Run) -> None:
    run.rows("h2", row(9, "other"), row(9))
    assert run.result["weights_identical"]


def test_what_was_found_to_differ_does_not_count(run: Run) -> None:
    run.rows("h2", row(3), row(4, "other"), row(5, "other"), row(8, view=2), row(9, view=2))
    assert not run.result["weights_identical"]
    run.facts("h1", differed=[{"name": "h2", "round": 4, "view": 1}])
    assert run.result["weights_identical"]
    assert run.result["differed"] == [{"name": "h2", "round": 4}]


def test_nothing_was_trained(run: Run) -> None:
    for name in HOSTS:
        run.rows(name)
    assert not run.result["weights_identical"] and run.result["weights_sha256"] is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([b"{"], "row 1 is not JSON: unexpected end"),
        ([[1]], "row 1 is [1], not an object"),
        ([row(2), {"round": 3}], 'row 2: "weights_sha256" is missing; it must be a'),
        ([row(2), {"weights_sha256": ""}], 'row 2: "round" is missing; it must be a'),
        ([row(2) | {"round": "2"}], "row 1: \"round\" is '2', not a whole number from 0 on"),
        ([row(2) | {"round": [2]}], 'row 1: "round" is a list, not a whole number from 0 on'),
        ([row(2) | {"round": True}], 'row 1: "round" is True, not a whole number'),
        ([row(-1)], 'row 1: "round" is -1, not a whole number'),
        ([row(2) | {"view": []}], 'row 1: "view" is a list, not a whole number'),
        ([row(2) | {"weights_sha256": 5}], 'row 1: "weights_sha256" is 5, not a text'),
        ([row(2), row(3, more="x" * 70000)], "row 2 is longer than 65536 bytes"),
        ([row(2)] * 1105, "there are more than 1104 rows"),
    ],
)
def test_rows_of_another_kind(run: Run, rows: list[Any], said: str) -> None:
    run.rows("h2", *rows)
    assert run.error.startswith(f"the records of h2 are not whole: metrics.jsonl: {said}")


@pytest.mark.parametrize("what", ["agent.json", "final.json"])
def test_files_of_another_kind(run: Run, what: str) -> None:
    path = run.folder / "h1" / what
    for puts, said in [
        (lambda: path.write_text("{"), "unexpected end"),
        (lambda: path.write_text("[]"), f"{what} is no JSON object"),
        (lambda: os.truncate(path, 1 << 40), "[Errno 27] More than 1048576 bytes"),
    ]:
        puts()
        assert run.error.startswith(f"the records of h1 are not whole: {said}")


def test_an_accuracy_that_is_none(run: Run) -> None:
    run.put("h1", "final.json", {"accuracy": "<script>"})
    assert run.result["test_accuracy"] is None


def test_an_endless_line_is_not_read(run: Run) -> None:
    os.truncate(run.folder / "h3" / "metrics.jsonl", 1 << 40)
    assert "65536 bytes" in run.error


def test_rows_are_not_kept(run: Run) -> None:
    """Long runs leave long records."""
    rounds = 8000
    for name in HOSTS:
        run.rows(name, *(row(k, padding="x" * 1000) for k in range(rounds)))
    tracemalloc.start()
    try:
        assert summarise(run.folder, HOSTS, rounds)["weights_identical"]
        assert tracemalloc.get_traced_memory()[1] < 128 * rounds + (1 << 20)
    finally:
        tracemalloc.stop()


# ---- by the lead


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[Rooms]:
    (tmp_path / "agent").mkdir()
    made = Rooms(tmp_path / "agent")
    yield made
    made.close()


def in_place(run: Run, rooms: Rooms) -> Path:
    """The run's folder is where that agent leaves its results."""
    rooms.settings.runs.mkdir()
    (rooms.settings.runs / "job").symlink_to(run.folder)
    return rooms.settings.runs / "job"


def test_the_loop_reads_no_records(tmp_path: Path, rooms: Rooms) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder)
    in_place(run, rooms)
    path = run.folder / "h2" / "metrics.jsonl"
    path.unlink()
    os.mkfifo(path)  # whoever reads it waits
    outcomes, errors = rooms.begin(MakeResult("job", HOSTS, LAST, {"data": "tiny"}))
    rooms.step()
    assert not outcomes and not errors
    path.write_bytes(b"".join(orjson.dumps(row(k)) + b"\n" for k in range(2, LAST + 1)))
    rooms.until(lambda: outcomes or errors, "the result is made")
    (result,) = outcomes
    assert result["weights_identical"] and result["data"] == "tiny"
    assert orjson.loads((run.folder / "result.json").read_bytes()) == result


def test_the_summarys_failure_is_told(tmp_path: Path, rooms: Rooms) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder)
    in_place(run, rooms)
    run.rows("h2", {"round": 9, "weights_sha256": "", "view": []})
    run.facts("h1", differed=[{"name": "h2", "round": 4, "view": 1}])
    outcomes, errors = rooms.begin(MakeResult("job", HOSTS, LAST, {}))
    rooms.until(lambda: outcomes or errors, "the result cannot be made")
    assert not outcomes
    assert errors[0].startswith("cannot make the summary of the run: ")


# ---- at every host


def test_what_is_demanded_of_records_is_checked_where_they_are_written(rooms: Rooms) -> None:
    """Not at the lead, after all have been collected."""
    rooms.executor.open_job(OpenJob("job"))
    job = rooms.executor.job
    assert job is not None
    metrics = '{"round": 6, "weights_sha256": ""}\n{"round": 7, "loss": 0.5}\n'
    (job.folder / "out" / "metrics.jsonl").write_text(metrics)
    outcomes, errors = rooms.begin(KeepRecords({}, 7))
    rooms.until(lambda: outcomes or errors, "the records are kept, or cannot be")
    assert errors == ['metrics.jsonl: row 2: "weights_sha256" is missing; it must be a text']
    rooms.executor.close_job(CloseJob())
