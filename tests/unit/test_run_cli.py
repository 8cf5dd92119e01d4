# SPDX-License-Identifier: Apache-2.0
"""`nicps run`: the exit code of a run, and what is said of its end."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nicps.cli import run
from nicps.cli.run import _finish, _Lines
from nicps.errors import NetworkProblem
from nicps.session.channel import ChannelClosed
from nicps.session.events import Launched

WHY = "cannot keep what the script has left: No space left on device; it is in /var/tmp/nicps-left-run-1-h2"


@pytest.mark.parametrize(
    ("codes", "identical", "not_kept", "expected"),
    [
        ({"h1": 0, "h2": 0}, True, {}, 0),
        ({"h1": 0, "h2": 0}, None, {"h2": WHY}, 8),
        ({"h1": 0, "h2": 3}, None, {"h2": WHY}, 3),
        ({"h1": 0, "h2": None}, None, {"h1": WHY}, 5),
        ({"h1": 0, "h2": 0}, False, {"h1": WHY}, 5),
    ],
)
def test_exit_codes(
    codes: dict[str, int | None],
    identical: bool | None,
    not_kept: dict[str, str],
    expected: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script's own code goes before that of files that could not be kept."""
    result: dict[str, Any] = {"exit_codes": codes, "weights_identical": identical, "folder": "runs"}
    assert _finish(result | {"not_kept": not_kept}, as_json=False) == expected
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if WHY in line] == [
        f"nicps: {name}: {why}" for name, why in not_kept.items()
    ]


def test_files_that_were_removed_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    removed = {
        "h1": {"files": 2, "first": ["log.csv", "model.pt"]},
        "h2": {"files": 5, "first": ["a", "b", "log.csv"]},
    }
    result: dict[str, Any] = {"exit_codes": {"h1": 0, "h2": 0}, "weights_identical": None}
    assert _finish(result | {"folder": "runs", "removed": removed}, as_json=False) == 0
    assert capsys.readouterr().err == (
        "nicps: 7 files that scripts wrote outside of out/ went with the folder on h1, h2: a, b, log.csv, model.pt,"
        " ...; what is written to out/ is kept\n"
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_error_of_a_process_group_that_is_not_ours_is_explained(stream: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    lines = _Lines(out, err)
    lines.add("h1", stream, "ValueError: env:// rendezvous: environment variable MASTER_A")
    lines.add("h1", stream, "DDR expected, but not set\n")
    lines.add("h2", "stdout", "the end")
    lines.close()
    assert out.getvalue().endswith("h2: the end\n")
    assert err.getvalue().splitlines()[-1] == (
        'nicps: "environment variable MASTER_ADDR expected": the process group is not that of nicps. The script needs'
        ' `import nicps.torch` and dist.init_process_group("nicps")'
    )


def test_other_output_is_not_explained() -> None:
    out, err = io.StringIO(), io.StringIO()
    lines = _Lines(out, err)
    lines.add("h1", "stderr", "ValueError: MASTER_ADDR\n")
    lines.close()
    assert (out.getvalue(), err.getvalue()) == ("", "h1: ValueError: MASTER_ADDR\n")


def test_the_end_of_a_line_as_on_windows_may_come_in_two_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = _Lines(out, io.StringIO())
    for piece in ("one\r", "\ntwo\r", "\n", "10%\r", "20%\r", "30%\r", "\n"):
        now[0] += 10.0
        lines.add("h1", "stdout", piece)
    assert out.getvalue().splitlines() == ["h1: one", "h1: two", "h1: 10%", "h1: 20%", "h1: 30%"]


def test_a_progress_bar_is_printed_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one long line, which a script begins anew with each carriage return."""
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = _Lines(out, io.StringIO())
    for at in range(100):
        now[0] = at / 10
        lines.add("h1", "stdout", f"\r{at}%" if at else "0%")
        lines.add("h2", "stdout", "." if at % 2 else "")
        assert len(lines._rest["h1", "stdout"]) < 10
    lines.add("h1", "stdout", "\r100%\nas on Windows\r\n\rlast")
    lines.close()
    printed = out.getvalue().splitlines()
    assert printed == [
        "h1: 0%",
        "h1: 50%",
        "h1: 100%",
        "h1: as on Windows",
        "h1: last",
        "h2: " + "." * 50,
    ]


def test_what_goes_on_once_the_agent_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the scripts are under way."""
    said: list[Launched] = []

    def follow(_: object) -> Iterator[Launched]:
        yield from said
        raise ChannelClosed("gone")

    channel: Any = None
    monkeypatch.setattr(run, "follow", follow)
    with pytest.raises(ChannelClosed):
        run._follow(channel, _Lines(io.StringIO(), io.StringIO()))
    said.append(Launched("run-1", ("h1", "h2"), "/runs/run-1"))
    with pytest.raises(NetworkProblem, match=r"on the other hosts go on, and .* in /runs/run-1 "):
        run._follow(channel, _Lines(io.StringIO(), io.StringIO()))


def test_an_interrupted_run_says_where_its_results_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent names the folder; one that was started before an upgrade does not."""

    def follow(channel: Any) -> Iterator[Launched]:
        yield Launched("run-1", ("h1", "h2"), channel)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "follow", follow)
    for folder, place in (("/runs/run-1", "/runs/run-1"), ("", "RUNS/run-1")):
        channel: Any = folder
        with pytest.raises(KeyboardInterrupt):
            run._follow(channel, _Lines(io.StringIO(), io.StringIO()))
        assert capsys.readouterr().err.splitlines()[-1] == (
            "nicps: run-1 ends on all hosts; what each of them has kept is in"
            f" {place} there, or in run-1 of its own --runs"
        )
