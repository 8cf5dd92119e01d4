# SPDX-License-Identifier: Apache-2.0
"""The compiled loops have NumPy's bits for every number there is, and are made only where they gain something."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nicps.session import loops
from nicps.session.absolute import AbsoluteQuantiser, AbsoluteSummer
from nicps.session.lanes import LaneFormat, Residual
from nicps.session.loops import LEAST_NUMBERS, Loops
from nicps.session.reducers import prepare
from tests.unit.test_session_stripes import LANES, WIDTH, Agent

pytest.importorskip("numba")

WIDTHS = (32, 16, 8)
F32 = npt.NDArray[np.float32]
#: Zeros, denormals, the ends of float32, and what is no number, as bits without a sign.
SPECIAL = (0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F7FFFFE, 0x7F800000, 0x7F800001, 0x7FC00000)


@cache
def compiled(width: int) -> Loops:
    return Loops(width)


class Pair:
    """Two quantisers with the same residual, with NumPy and with the loops, and what both have written."""

    def __init__(self, format: LaneFormat, kept: F32) -> None:
        self.format = format
        self.quantisers, self.residuals = [], []
        for _ in range(2):
            residual = Residual(format)
            residual.kept[:] = kept
            residual.limit = float(np.abs(kept).max())
            self.residuals.append(residual)
            self.quantisers.append(AbsoluteQuantiser(format, residual))
        self.quantisers[1].loops = compiled(format.width)
        self.records = [records(format) for _ in range(2)]

    def same(self) -> None:
        first, second = self.residuals
        assert (first.kept.view(np.uint32) == second.kept.view(np.uint32)).all()
        assert (first.limit, first.next_limit) == (second.limit, second.next_limit)
        assert self.records[0].tobytes() == self.records[1].tobytes()


def records(format: LaneFormat) -> npt.NDArray[Any]:
    """As those of the maps, with something between the lanes of two fragments."""
    lanes = "lanes", format.wire, format.per_fragment
    record = np.dtype([("exponent", "i1"), ("between", "u1", 7), lanes])
    return np.full(format.fragments * record.itemsize, 77, np.uint8).view(record)


@st.composite
def numbers(draw: st.DrawFn, size: int) -> F32:
    """Of one size or of many, and some of them special."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    low = draw(st.integers(-150, 127))
    high = draw(st.integers(low, 127))
    halves = draw(st.booleans())  # are rounded to even
    with np.errstate(over="ignore"):
        found = (rng.uniform(-2, 2, size) * 2.0 ** rng.uniform(low, high, size)).astype(np.float32)
        if halves:
            found = np.ldexp(np.rint(np.ldexp(found, -low)) / 2, low).astype(np.float32)
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, size - 1))
        bits = draw(st.sampled_from(SPECIAL) | st.integers(0, (1 << 31) - 1))
        found.view(np.uint32)[at : at + draw(st.integers(1, 3))] = (
            bits | draw(st.integers(0, 1)) << 31
        )
    return found


@st.composite
def edges(draw: st.DrawFn, width: int, size: int) -> F32:
    """Largest lanes, and the numbers beside them."""
    end = np.float32(LaneFormat(1, width).largest_lane * 2.0 ** draw(st.integers(-121, 96)))
    around = [end, np.nextafter(end, np.float32(0)), np.nextafter(end, np.float32(np.inf))]
    found = np.zeros(size, np.float32)
    found[draw(st.integers(0, size - 1))] = draw(st.sampled_from(around)) * draw(
        st.sampled_from([-1, 1])
    )
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[LaneFormat, F32, F32]:
    """A format, a vector, and a residual, which is finite."""
    width = draw(st.sampled_from(WIDTHS))
    format = LaneFormat(draw(st.integers(1, 3 * LaneFormat(1, width).per_fragment)), width)
    vector = draw(numbers(format.lanes) | edges(width, format.lanes))
    kept = np.zeros(format.fragments * format.per_fragment, np.float32)
    if draw(st.booleans()):
        kept[: format.lanes] = np.nan_to_num(draw(numbers(format.lanes)), posinf=1e38, neginf=-1e38)
    return format, vector, kept


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_vectors_and_residuals(case: tuple[LaneFormat, F32, F32], data: st.DataObject) -> None:
    """Conversion, what rounding leaves over where the sum is finite, and remainders added to it."""
    format, vector, kept = case
    pair = Pair(format, kept)
    first = data.draw(st.integers(0, format.fragments - 1))
    for quantiser, record in zip(pair.quantisers, pair.records, strict=True):
        quantiser.begin()
        for at, count in ((0, first), (first, format.fragments - first)):
            if count:
                quantiser.batch(vector, at, count, record["lanes"], record["exponent"])
    pair.same()
    lost = np.array(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))[: format.fragments]
    for quantiser, record in zip(pair.quantisers, pair.records, strict=True):
        quantiser.keep(vector, record["lanes"], record["exponent"], lost)
    pair.same()
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    shape = (format.fragments - first, format.per_fragment)
    rest = rng.integers(-1 << 63, (1 << 63) - 1, shape) >> rng.integers(0, 64, shape)
    exponents, unit = (
        rng.integers(-120, 127, shape[0]).astype(np.int8),
        data.draw(st.integers(-170, 127)),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        for quantiser in pair.quantisers:
            quantiser.add(first, rest, exponents, ~lost[first:], unit)
    pair.same()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WIDTHS), st.data())
def test_sums(width: int, data: st.DataObject) -> None:
    """Any lanes with any exponents, into a vector that ends anywhere."""
    format = LaneFormat(data.draw(st.integers(1, 3 * LaneFormat(1, width).per_fragment)), width)
    record = records(format)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    record.view(np.uint8)[:] = rng.integers(0, 256, record.view(np.uint8).shape)
    ends = st.sampled_from((-128, -127, -126, -120, 0, 96, 97, 120, 126, 127))
    exponents = data.draw(st.lists(ends | st.integers(-128, 127), min_size=3, max_size=3))
    record["exponent"] = exponents[: format.fragments]
    record.setflags(write=False)
    found = []
    for each in (None, compiled(width)):
        out, summer = np.full(format.lanes + 2, 5, np.float32), AbsoluteSummer(format)
        summer.loops = each
        summer.batch(record["lanes"], record["exponent"], 0, format.fragments, out[: format.lanes])
        found.append(out)
    assert found[0].tobytes() == found[1].tobytes() and (found[1][format.lanes :] == 5).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_laid_out_in_another_way_is_left_to_numpy(width: int) -> None:
    made, format = compiled(width), LaneFormat(2000, width)
    vector, kept, record = np.ones(2000, np.float32), np.zeros(2000, np.float32), records(format)
    lanes, exponents, lost = (
        record["lanes"],
        record["exponent"],
        np.zeros(format.fragments, np.bool_),
    )
    long = np.zeros(lanes.size + 1, np.float32)
    assert made.quantise(vector, kept, lanes, exponents)
    before = record.tobytes()
    for other in (vector.astype(np.float64), np.ones(4000, np.float32)[::2], vector[1:]):
        assert not made.quantise(other, kept, lanes, exponents)  # type: ignore[arg-type]
    assert not made.quantise(long, long, lanes, exponents)
    assert not made.quantise(vector, kept, lanes[:, ::2], exponents)
    assert not made.quantise(vector, kept, lanes[:, 1:], exponents)
    assert not made.quantise(vector, kept, lanes[::-1], exponents)
    assert not made.quantise(vector, kept, lanes, exponents[1:])
    if width > 8:
        assert not made.quantise(vector, kept, lanes.view(format.native), exponents)
    assert not made.keep(vector, kept, lanes, exponents, lost)  # not whole fragments
    assert not made.keep(vector, long[:-1], lanes, exponents, lost[1:])
    assert not made.keep(vector, long[:-1], lanes, exponents, np.repeat(lost, 2)[::2])
    assert not made.read(lanes, exponents, np.zeros(4000, np.float32)[::2])
    record.setflags(write=False)
    vector.setflags(write=False)
    assert not made.quantise(vector, kept, record["lanes"], record["exponent"])
    assert not made.read(lanes, exponents, vector)
    rest, rows = np.zeros(lanes.shape, np.int64), long[:-1].reshape(lanes.shape)
    assert made.add(rows, rest, ~lost, 1.0)
    assert not made.add(rows, rest[:, ::-1], ~lost, 1.0)
    assert not made.add(rows[1:], rest, ~lost, 1.0)
    assert record.tobytes() == before


def test_a_vector_that_is_no_float32_is_converted_by_numpy() -> None:
    """Batch by batch, as NumPy's code has no room for more."""
    lanes = 720 * (2 * LaneFormat(1, 16).batch + 3) - 7
    format = LaneFormat(lanes, 16)
    pair = Pair(format, np.zeros(format.fragments * 720, np.float32))
    vector = np.random.default_rng(1).standard_normal(2 * lanes)[::2]
    for quantiser, record in zip(pair.quantisers, pair.records, strict=True):
        quantiser.batch(vector, 0, format.fragments, record["lanes"], record["exponent"])  # type: ignore[arg-type]
    pair.same()
    assert pair.records[0]["exponent"].all()


# ---- where the loops are made


def run(code: str, **options: Any) -> list[str]:
    """The lines that a program of its own prints; it says nothing else."""
    imports = (
        "import sys; from nicps.session.lanes import LaneFormat; from nicps.session import loops\n"
    )
    command = [sys.executable, "-c", imports + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def asks_for(numbers: int) -> str:
    """Which are they for such a vector, and is numba there?"""
    return f"print(type(loops.loops_for(LaneFormat({numbers}, 16))).__name__, 'numba' in sys.modules)\n"


def elsewhere(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps code in this folder, or nowhere if it cannot be made."""
    kept = {"HOME": str(folder), "PYTHONPYCACHEPREFIX": str(folder)}
    return {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_"))} | kept


def test_only_a_large_vector_has_loops_and_numba_stays_outside() -> None:
    code = "import nicps.client, nicps.collective\n" + asks_for(LEAST_NUMBERS - 1)
    assert run(code + asks_for(LEAST_NUMBERS)) == ["NoneType", "False", "Loops", "False"]


def test_loops_take_next_to_no_memory(tmp_path: Path) -> None:
    """In the process that compiles, and in the next one, which finds the code. numba has taken 47 MB."""
    code = (
        "import os, nicps.client; from nicps.bench.memory import anonymous_bytes\n"
        "before = anonymous_bytes(os.getpid())\n"
        f"assert loops.loops_for(LaneFormat({LEAST_NUMBERS}, 8))\n"
        "print(anonymous_bytes(os.getpid()) - before)\n"
    )
    for kept in (0, 1):
        assert len(list(tmp_path.rglob("loops8.bin"))) == kept
        assert int(run(code, env=elsewhere(tmp_path))[0]) < 1.5e6


def test_without_numba_numpy_converts() -> None:
    assert run("sys.modules['numba'] = None\n" + asks_for(LEAST_NUMBERS))[0] == "NoneType"


def test_with_a_numba_that_does_not_work_numpy_converts(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('no such symbol')\n")
    path = {"PYTHONPATH": str(tmp_path)}
    assert run(asks_for(LEAST_NUMBERS), env=os.environ | path) == ["NoneType", "False"]


def kept_code(folder: Path, **env: str) -> bytes:
    """What a process of its own has compiled, and kept in that folder."""
    found = run(asks_for(LEAST_NUMBERS), env=elsewhere(folder) | env)
    assert found[-2:] == ["Loops", "False"]
    (path,) = folder.rglob("loops16.bin")
    return path.read_bytes()


@pytest.fixture(scope="module")
def silently_made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The code, where nothing is printed."""
    return kept_code(tmp_path_factory.mktemp("without"))


@pytest.mark.parametrize(
    ("site", "settings_"),
    [("print('hello')", {}), ("", {"NUMBA_DUMP_BYTECODE": "1"})],
    ids=["a site that prints", "numba's own output"],
)
def test_what_is_printed_is_no_machine_code(
    tmp_path: Path, silently_made: bytes, site: str, settings_: dict[str, str]
) -> None:
    """What is kept is the same, byte for byte."""
    (tmp_path / "sitecustomize.py").write_text(site)
    prints = {"PYTHONPATH": str(tmp_path)} | settings_
    assert kept_code(tmp_path / "with", **prints) == silently_made


def test_code_of_a_child_that_failed_is_not_kept(tmp_path: Path) -> None:
    """A process that ignores SIGCHLD hears of every child that it went well."""
    (tmp_path / "numba.py").write_text("raise ImportError('no such symbol')\n")
    env = elsewhere(tmp_path / "kept") | {"PYTHONPATH": str(tmp_path)}
    ignores = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    assert run(ignores + asks_for(LEAST_NUMBERS), env=env)[0] == "NoneType"
    assert not list(tmp_path.rglob("loops16.bin"))


def test_a_user_without_a_home_compiles_and_is_told_nothing() -> None:
    """As the training user of an agent: neither nicps nor a home can be written to."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    found = run(asks_for(LEAST_NUMBERS), env=elsewhere(Path("/nonexistent")), **nobody)
    assert found == ["Loops", "False"]


@pytest.mark.parametrize(
    ("settings_", "rounds", "made"),
    [
        ({"exchange": "broadcast"}, LEAST_NUMBERS, []),
        ({"system": "S"}, LEAST_NUMBERS, []),
        ({"rank": 2}, LEAST_NUMBERS - 1, []),
        ({"rank": 2}, LEAST_NUMBERS, [8]),
        ({"bucket_mb": 1.0}, LEAST_NUMBERS - 1, [8]),
        ({"exchange": "switch"}, LEAST_NUMBERS, [8]),
        ({}, LEAST_NUMBERS, [8]),
    ],
    ids=["broadcast", "servers", "short factors", "factors", "buckets", "a switch", "no exchange"],
)
def test_a_job_compiles_before_it_begins_what_it_may_need(
    monkeypatch: pytest.MonkeyPatch, settings_: dict[str, Any], rounds: int, made: list[int]
) -> None:
    """Factors go out in place of a gradient that is longer than they are."""
    monkeypatch.setattr(loops, "_made", {})
    monkeypatch.setattr(loops, "Loops", compiled)
    prepare(LaneFormat(rounds, 8), LEAST_NUMBERS, settings_)
    assert list(loops._made) == made


def test_all_is_compiled_before_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before the program is ready: not when records are mapped, and not in a round."""
    agent, heard = Agent(), []

    def make(width: int) -> Loops:
        heard.append((width, agent.channel.wait(0.0)))
        return compiled(width)

    monkeypatch.setattr(loops, "LEAST_NUMBERS", LANES)
    monkeypatch.setattr(loops, "_made", {})
    monkeypatch.setattr(loops, "Loops", make)
    agent.ready()
    assert heard == [(WIDTH, False)]
    agent.enter("train", 7)
    vector = np.random.default_rng(1).standard_normal(LANES).astype(np.float32)
    agent.session.contribute(7, vector, 1)
    agent.offered(7, vector)
    assert len(heard) == 1
    agent.close()
