# SPDX-License-Identifier: Apache-2.0
"""The calls of a group, between threads in place of hosts, against NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nicps.collective import CallMismatch, Group, GroupClosed, MemberLost
from nicps.collective.lanes import Floats, Words
from nicps.errors import UsageProblem
from nicps.wire import MOST_SIZED, NOT_FINITE, size_of, sized_samples, width_of
from tests import striped_reference as reference
from tests.collectives import Drawn, Meeting, draw, make, together


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 5),
    room=st.sampled_from([1, 3, 8000]),
)
@example(seed=859, size=4, room=1)  # as many bytes as are gathered
@example(seed=706, size=3, room=1)  # numbers that all but cancel, in a fragment that is gathered
def test_drawn_calls_come_to_what_numpy_makes_of_them(seed: int, size: int, room: int) -> None:
    """Any type, length and call; rounds of one fragment, of a few, and of all."""
    calls = [draw(seed, number, size) for number in range(6)]

    def program(group: Group) -> list[bytes]:
        futures = [call.call(group) for call in calls]
        results = [future.result(20) for future in futures]
        for call, result in zip(calls, results, strict=True):
            call.check(result, group.rank, list(range(size)))
        same = ("all_reduce", "broadcast", "all_gather")
        return [r.tobytes() for c, r in zip(calls, results, strict=True) if c.what in same]

    found = together(Meeting(size, room), program)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    assert all(each == found[0] for each in found)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(2, 5),
    at=st.integers(2, 20),
    data=st.data(),
)
def test_calls_go_on_with_those_who_are_left(
    seed: int, size: int, at: int, data: st.DataObject
) -> None:
    """A member is lost before some round, perhaps in the middle of a call: its sum is of one list."""
    lost = data.draw(st.integers(2, size))
    calls = [draw(seed, number, size) for number in range(8)]
    outcomes: list[list[str]] = []

    def program(group: Group) -> None:
        told: list[str] = []
        for call in calls:
            try:
                result = call.call(group).result(20)
            except MemberLost:
                assert call.needs() & {lost - 1} and group.lost == (lost - 1,)
                told.append("lost")
                continue
            counted = [rank for rank in range(size) if rank not in group.lost]
            assert not call.needs() - set(counted)
            call.check(result, group.rank, counted)
            told.append(str(counted))
        outcomes.append(told)

    found = together(Meeting(size, 2, loses={lost: at}), program)
    rest = [each for number, each in enumerate(found, 1) if number != lost]
    for each in rest:
        if isinstance(each, BaseException):
            raise each
    survivors = outcomes[: size - 1]
    assert all(each == survivors[0] for each in survivors)


def test_the_sums_are_those_of_the_reference() -> None:
    """What these tests add with is what the kernel's programs add with."""
    random = np.random.default_rng(3)
    vectors = [(random.standard_normal(360) * 2.0**k).astype(np.float32) for k in (0, 9, -40)]
    outs = [np.empty(360, np.float32) for _ in vectors]
    floats = [Floats(v, o, np.zeros(1, np.bool_)) for v, o in zip(vectors, outs, strict=True)]
    made = make(list(floats))
    members = [reference.Member(32, np.zeros(360, np.float32)) for _ in vectors]
    pieces = [m.convert(v)[0] for m, v in zip(members, vectors, strict=True)]
    expected = reference.add(pieces, 32, made.unit)
    assert made.lanes[0].tolist() == expected.lanes
    assert int(made.exponents[0]) == expected.exponent
    floats[0].settle(made.outcome(0))
    assert (outs[0] == expected.values()).all()


def test_whole_numbers_that_do_not_fit_are_known() -> None:
    """Not their sum but the exponent of it tells: so all members know the same fragments."""
    words = np.array([2**31 - 1] * 360 + [7, -(2**31)] + [0] * 358, np.int32)
    out, marred = np.zeros(720, np.int32), np.zeros(2, np.bool_)
    made = make([Words(words, out, marred), Words(words[::-1].copy()[::-1], out, marred)])
    Words(words, out, marred).settle(made.outcome(0))
    assert marred.all()
    small = np.array([2**30 - 1, -(2**30)] * 180, np.int32)
    made = make([Words(small, out[:360], marred[:1])] * 2)
    Words(small, out[:360], marred[:1]).settle(made.outcome(0))
    assert not marred[0] and (out[:360] == 2 * small).all()


_PRODUCT = """
import hashlib, numpy as np
from nicps.collective.kinds import Kind
random = np.random.default_rng(1)
for name in ("complex64", "complex128"):
    rows = (random.standard_normal((3, 1000)) + 1j * random.standard_normal((3, 1000))).astype(name)
    found = Kind.of(rows[0]).fold(rows, "product")
    np.testing.assert_allclose(found, rows[0] * rows[1] * rows[2], rtol=1e-4, atol=1e-5)
    print(hashlib.sha256(found.tobytes()).hexdigest())
"""


def test_a_product_has_the_same_bits_on_another_processor() -> None:
    """Every member makes it of what it has gathered. NumPy may fuse operations on complex numbers."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    plain = " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])
    said = {
        subprocess.run(
            [sys.executable, "-c", _PRODUCT],
            env={**os.environ, **more},
            stdout=subprocess.PIPE,
            timeout=100,
            check=True,
        ).stdout
        for more in ({}, {"NPY_DISABLE_CPU_FEATURES": plain})
    }
    assert len(said) == 1


def both(program: Any, size: int = 2, **options: Any) -> list[Any]:
    return together(Meeting(size, **options), program)


def test_a_small_number_beside_a_large_one_keeps_its_value() -> None:
    def program(group: Group) -> list[float]:
        mine = [1e10, 1.0] if group.rank == 0 else [-1e10, 1.0]
        return list(group.all_reduce(np.array(mine, np.float32)).result(10))

    assert both(program) == [[0.0, 2.0]] * 2


def test_one_number_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    def program(group: Group) -> Any:
        mine = np.full(1000, group.rank + 1, np.float32)
        mine[5] = np.inf if group.rank else 1.0
        mine[700] = np.nan if group.rank else 1.0
        return group.all_reduce(mine).result(10)

    for found in both(program):
        assert found[5] == np.inf and np.isnan(found[700])
        assert (np.delete(found, [5, 700]) == 3).all()


def test_a_sum_beyond_float32_leaves_its_neighbours_alone() -> None:
    def program(group: Group) -> Any:
        mine = np.ones(720, np.float32)
        mine[5], mine[6] = 3e38, -1.0
        return group.all_reduce(mine).result(10)[:360]

    for found in both(program):
        assert found[5] == np.inf and found[6] == -2.0
        assert (np.delete(found, [5, 6]) == 2).all()


def test_members_that_call_different_things_are_all_told_who_called_what() -> None:
    def program(group: Group) -> str:
        first = np.zeros(10, np.float32)
        future = (
            group.broadcast(np.zeros(7, np.int64), 0)
            if group.rank == 1
            else group.all_reduce(first)
        )
        with pytest.raises(CallMismatch) as caught:
            future.result(10)
        assert group.all_reduce(np.ones(3, np.int32)).result(10).tolist() == [3] * 3  # it goes on
        return str(caught.value)

    text = "the members have called different things: h1 (rank 0), h3 (rank 2): all_reduce(sum) of 10 float32;"
    for said in both(program, 3):
        assert said == f"{text} h2 (rank 1): broadcast from rank 0 of 7 int64"


@pytest.mark.parametrize("length", [11, 1000, 4_000_000])
def test_a_length_that_differs_is_named(length: int) -> None:
    def program(group: Group) -> str:
        mine = np.zeros(10 if group.rank else length, np.float32)
        with pytest.raises(CallMismatch) as caught:
            group.all_reduce(mine).result(10)
        return str(caught.value)

    for said in both(program):
        assert f"{length:,} float32" in said and "of 10 float32" in said


def test_ranks_are_those_that_the_members_say() -> None:
    def program(group: Group) -> Any:
        return group.rank, group.names, group.all_gather(np.array([group.rank])).result(10).tolist()

    found = together(Meeting(3), program, ranks=[2, 0, 1])
    names = ("h2", "h3", "h1")
    assert found == [(k, names, [[0], [1], [2]]) for k in (2, 0, 1)]


@pytest.mark.parametrize("ranks", [[0, 0], [0, 2], [0, None]])
def test_ranks_that_cannot_be_meant(ranks: list[int | None]) -> None:
    for found in together(Meeting(2), lambda group: None, ranks=ranks):
        assert isinstance(found, UsageProblem)
        assert "ranks must be 0 to 1, each once: h1 0, h2" in str(found)


def test_what_the_root_would_have_given() -> None:
    def program(group: Group) -> str:
        with pytest.raises(MemberLost) as caught:
            group.broadcast(np.zeros(5, np.uint8), 1).result(10)
        return str(caught.value)

    found = together(Meeting(3, loses={2: 2}), program)
    assert isinstance(found[1], BaseException)
    expected = "broadcast from rank 1 of 5 uint8 needs what h2 would have given, and left before"
    assert [found[0], found[2]] == [expected] * 2


def test_who_leaves_is_told_once() -> None:
    told: list[tuple[int, ...]] = []

    def program(group: Group) -> tuple[int, ...]:
        if group.rank == 0:
            group.on_loss = told.append
        for _ in range(4):
            group.barrier().result(10)
        return group.lost

    found = together(Meeting(3, loses={3: 3}), program)
    assert found[:2] == [(2,), (2,)] and told == [(2,)]
    assert isinstance(found[2], GroupClosed)


def test_a_member_is_lost_while_all_say_what_they_have_called() -> None:
    """What eight members say takes two rounds of a fragment. All seven that are left are told, and they go on."""

    def program(group: Group) -> str:
        call = group.barrier if group.rank == 0 else lambda: group.all_reduce(np.zeros(3))
        with pytest.raises(CallMismatch) as caught:
            call().result(10)
        assert group.all_reduce(np.ones(3, np.int32)).result(10).tolist() == [7] * 3
        return str(caught.value)

    # The ranks are round 1, and the calls differ in round 2.
    *found, lost = together(Meeting(8, room=1, loses={8: 4}), program)
    assert isinstance(lost, GroupClosed)
    assert len({*found}) == 1 and "h7 (rank 6): all_reduce(sum) of 3 float64" in found[0]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_an_error_where_a_loss_is_told_costs_no_call(
    error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may mean to end there; the thread that would end is that of all calls."""

    def tell(_: tuple[int, ...]) -> None:
        raise error("told")

    def program(group: Group) -> None:
        group.on_loss = tell
        for _ in range(4):
            group.barrier().result(10)

    found = together(Meeting(3, loses={3: 3}), program)
    assert found[:2] == [None, None]
    assert capsys.readouterr().err.count(f"{error.__name__}: told") == 2


def test_a_callback_that_would_wait_for_its_own_thread_is_told_so() -> None:
    """It may make a call, though, and wait for what is done."""

    def program(group: Group) -> list[Any]:
        refused: list[Any] = []
        ended = threading.Event()
        held = threading.Event()

        def call(first: Future[Any]) -> None:
            refused.append(first.result()[0])
            second = group.all_reduce(np.ones(3, np.float32))
            for wait in (second.result, second.exception, group.admit().result):
                try:
                    wait(5)
                except UsageProblem as error:
                    refused.append(str(error))
            second.add_done_callback(lambda done: refused.append(done.result()[0]))
            second.add_done_callback(lambda _: ended.set())

        group._workers.put(0, partial(held.wait, 20))
        group.all_reduce(np.ones(3, np.float32)).add_done_callback(call)
        held.set()
        assert ended.wait(20)
        return refused

    for found in together(Meeting(2), program):
        assert (found[0], found[-1]) == (2.0, 2.0)
        assert len(found) == 5 and all("would wait for itself" in each for each in found[1:4])


def test_a_group_that_is_closed_in_a_callback_ends_behind_it() -> None:
    def program(group: Group) -> Any:
        found: Future[Any] = Future()
        held = threading.Event()

        def close(_: Future[Any]) -> None:
            try:
                found.set_result(group.close())
            except BaseException as error:
                found.set_exception(error)

        group._workers.put(0, partial(held.wait, 20))
        group.barrier().add_done_callback(close)
        held.set()
        return found.result(20)

    assert together(Meeting(2), program) == [None, None]


def test_where_a_loss_is_told_no_call_is_made() -> None:
    """It would wait for the thread that it is in."""
    refused: list[str] = []

    def program(group: Group) -> None:
        def tell(_: tuple[int, ...]) -> None:
            for call in (group.barrier, group.admit, group.close):
                with pytest.raises(UsageProblem, match=r"on_loss .* cannot make any") as caught:
                    call()
                refused.append(str(caught.value))

        group.on_loss = tell
        for _ in range(4):
            group.barrier().result(10)

    assert together(Meeting(2, loses={2: 3}), program)[0] is None
    assert len(refused) == 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: g.all_reduce(np.zeros(3, "datetime64[s]")), "cannot be exchanged"),
        (lambda g: g.all_reduce(np.zeros(3), "median"), "'median' is not an operation"),
        (lambda g: g.all_reduce(np.zeros(3), "band"), "needs whole numbers"),
        (lambda g: g.all_reduce(np.zeros(3, np.int8), "avg"), "needs numbers with fractions"),
        (lambda g: g.all_reduce(np.zeros(3, np.complex64), "max"), "cannot be made of complex64"),
        (lambda g: g.broadcast(np.zeros(3), 2), "there is no rank 2"),
        (lambda g: g.reduce_scatter(np.zeros(3)), "cannot be dealt out to 2 members"),
        (lambda g: g.all_reduce(np.zeros(3), dtype="bfloat16"), "must be a NumPy array of uint16"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(call: Any, text: str) -> None:
    def program(group: Group) -> None:
        with pytest.raises(UsageProblem, match=text):
            call(group)

    assert both(program) == [None, None]


def test_no_call_after_the_end() -> None:
    def program(group: Group) -> None:
        group.close()
        with pytest.raises(GroupClosed, match="is closed"):
            group.barrier()

    assert both(program) == [None, None]


def test_an_offer_says_size_and_call_in_31_bits() -> None:
    for fragments in (1, 360, MOST_SIZED):
        for call in (0, 1, 0xFFFFFFFF):
            assert 0 < sized_samples(fragments, call) < 1 << 31
            assert size_of(sized_samples(fragments, call)) == fragments
            for width in (8, 16, 32):
                assert width_of(sized_samples(fragments, call, width)) == width
                assert size_of(sized_samples(fragments, call, width)) == fragments
    assert sized_samples(5, 1) != sized_samples(5, 2)
    assert NOT_FINITE == 127


def test_drawn_calls_are_all_kinds() -> None:
    """The tests above are about something."""
    drawn = [draw(1, number, 3) for number in range(400)]
    assert {call.what for call in drawn} > {"all_reduce", "reduce", "reduce_scatter", "barrier"}
    assert any(call.marred for call in drawn) and isinstance(drawn[0], Drawn)
