# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.simulator --exchange all`: seeds that have all exchanges between them."""

from __future__ import annotations

from collections import Counter

import pytest

from nicps.exchange import Exchange
from tests.simulator import schedules
from tests.simulator.__main__ import Job, digest, main
from tests.simulator.schedules import EXCHANGES, exchange_of

pytestmark = pytest.mark.unit


def command(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["simulator", *options])
    return main()


def test_a_small_range_has_each_exchange_about_equally_often() -> None:
    assert len(set(EXCHANGES)) == 5, "all that nicps/exchange.py has"
    assert {exchange_of(seed) for seed in range(20)} == set(EXCHANGES)
    counts = Counter(exchange_of(seed) for seed in range(2_000_000, 2_010_000))
    assert all(1_800 < counts[exchange] < 2_200 for exchange in EXCHANGES)


def first_of(exchange: Exchange) -> int:
    """The first seed that has that exchange."""
    return next(seed for seed in range(100) if exchange_of(seed) == exchange)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_a_seed_has_the_schedule_that_it_has_with_that_exchange(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = first_of(exchange)
    assert schedules.lan_of(seed, series=exchange_of(seed)).plan.exchange == exchange
    printed = []
    for value in ("all", exchange.name):
        options = ("--exchange", value, "--first", str(seed), "--seeds", "1", "--digest")
        assert command(monkeypatch, *options) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert digest(Job(seed, None, exchange))[1] in printed[0]


def test_a_single_seed_has_its_exchange_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = first_of(Exchange.STRIPES)
    traces = []
    for value in ("all", "stripes"):
        command(monkeypatch, "--exchange", value, "--seed", str(seed), "--trace", "100000")
        traces.append(capsys.readouterr().out)
    assert len(traces[0].splitlines()) > 100
    assert traces[0] == traces[1]


def test_it_counts_the_seeds_of_each_exchange(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(seed: int, *_: object) -> None:
        if exchange_of(seed) == Exchange.STRIPES:
            raise schedules.Violation("a mistake")
        raise ValueError("a defect")

    monkeypatch.setattr(schedules, "lan_of", failing)
    assert command(monkeypatch, "--exchange", "all", "--seeds", "20", "--jobs", "1") == 1
    lines = capsys.readouterr().out.splitlines()
    expected = Counter(exchange_of(seed) for seed in range(20))
    for exchange in EXCHANGES:
        what = "violation" if exchange == Exchange.STRIPES else "error"
        assert f"{expected[exchange]:6} {exchange.name}: {what} {expected[exchange]}" in lines
    again = f"seed {first_of(Exchange.STRIPES)} --exchange stripes: violation: a mistake"
    assert again in lines


@pytest.mark.parametrize("other", ["--steps", "--channels", "--sized"])
def test_jobs_of_steps_or_channels_have_an_exchange_of_their_own(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "--exchange", "all", other)
    assert "--exchange all is not possible with" in capsys.readouterr().err
