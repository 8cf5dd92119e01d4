# SPDX-License-Identifier: Apache-2.0
"""Means in narrow lanes that torch converts, on the processor and on a GPU where there is one: the bits of NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nicps.collective import CallMismatch, Group, GroupClosed  # noqa: E402
from nicps.collective.feedback import Compressed  # noqa: E402
from nicps.session.absolute import exponents_of  # noqa: E402
from nicps.session.lanes import F32, LaneFormat  # noqa: E402
from nicps.session.sized import Outcome  # noqa: E402
from nicps.torch.on_device import OnDevice, quantise, read  # noqa: E402
from nicps.wire import NOT_FINITE  # noqa: E402
from tests.averages import checked, gradients, numbers, results  # noqa: E402
from tests.collectives import Meeting  # noqa: E402
from tests.conversions import conversion  # noqa: E402, F401

#: A machine without a GPU has nothing to skip: it has one device.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class There(OnDevice):
    """NumPy's vector and residual on that device, and back."""

    def __init__(self, vector: F32, residual: F32, width: int, device: str) -> None:
        self._here = vector, residual
        there = [torch.from_numpy(each).to(device, copy=True) for each in self._here]
        super().__init__(there[0], there[1], width)

    def settle(self, outcome: Outcome) -> None:
        super().settle(outcome)
        for here, there in zip(self._here, (self._vector, self._residual), strict=True):
            here[:] = there.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("length", [1, 359, 1440, 1441, 7000, 200_003])
def test_all_that_a_round_writes(length: int, width: int, device: str) -> None:
    """With remainders and without, counted or not, with fragments that are NaN; the processor's code is either one."""
    for seed in range(8):
        found = results(lambda *of: There(*of, device=device), length, width, seed)
        assert found == results(Compressed, length, width, seed)


EDGES = [0.0, 1e-45, 2.0**-149, 2.0**-126, 2.0**-120, 127 * 2.0**-120, 127.5 * 2.0**-120, 1.0]
EDGES += [127.0, 127.25, 127.49999, 127.5, 128.0, 32767.0, 32767.5, 32768.0]
EDGES += [2147483520.0, 2147483648.0, 127 * 2.0**121, 127.4 * 2.0**121, 127.6 * 2.0**121]
EDGES += [3.4028235e38, float("inf"), float("nan")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [8, 16, 32])
def test_exponents_of_the_largest_magnitudes(width: int, device: str) -> None:
    """A fragment for each number and its neighbours, of both signs: ends of ranges, denormals, what is not finite."""
    format = LaneFormat(1, width)
    edges = np.array(EDGES, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        ends = np.float32(0), np.float32(np.inf)
        edges = np.concatenate([edges, *(np.nextafter(edges, end) for end in ends)])
        wanted = exponents_of(np.abs(edges), format)
    value = np.zeros((len(edges), format.per_fragment), np.float32)
    value[:, 7] = np.where(np.arange(len(edges)) % 2, -edges, edges)
    lanes, exponents = quantise(torch.from_numpy(value).to(device), format)
    assert exponents.tolist() == wanted.tolist() and NOT_FINITE in wanted
    lost = wanted == NOT_FINITE
    assert not lanes[torch.from_numpy(lost)].any()
    back = read(lanes, exponents).cpu().numpy()
    assert np.isnan(back[lost]).all() and np.isfinite(back[~lost]).all()
    exact = np.ldexp(value[~lost].astype(np.float64), -wanted[~lost, None])
    assert np.array_equal(lanes.cpu().numpy()[~lost], np.rint(exact))


@pytest.mark.parametrize("device", DEVICES)
def test_halves_are_rounded_to_even(device: str) -> None:
    format = LaneFormat(1, 8)
    value = torch.zeros(1, format.per_fragment, device=device)
    value[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantise(value, format)[0][0, :6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [8, 16, 32])
def test_a_bound_is_the_largest_exponent_that_is_sent(width: int, device: str) -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        vector, residual = numbers(random, 9000, finite=False), np.zeros(9000, np.float32)
        sent, found = Compressed(vector, residual, width), There(vector, residual, width, device)
        format = LaneFormat(9000, width)
        lanes = np.zeros((format.fragments, format.per_fragment), format.wire)
        x = np.zeros(format.fragments, np.int8)
        sent.write(0, format.fragments, lanes, x)
        assert found.bound() == max(x[x != NOT_FINITE]) <= sent.bound()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_converted_as_float32(dtype: Any, device: str) -> None:
    """Vectors may be half as long; a mean is rounded once."""
    random = np.random.default_rng(3)
    given = torch.from_numpy(random.standard_normal(3000).astype(np.float32)).to(dtype)
    wide, residual = given.to(torch.float32), torch.full((3000,), 2.0**-9)
    vector, kept = given.to(device), residual.to(device, copy=True)
    format = LaneFormat(3000, 8)
    for round_ in (OnDevice(vector, kept, 8), Compressed(wide.numpy(), residual.numpy(), 8)):
        own: Any = np.zeros((3, 1440), format.wire), np.zeros(3, np.int8)
        round_.write(0, 3, *own)
        round_.settle(Outcome(3, *own, *own, 3, -60))
    assert torch.equal(vector.cpu(), wide.to(dtype)) and torch.equal(kept.cpu(), residual)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lane", ["i8", "i16", "i32"])
def test_a_member_with_tensors_among_others(lane: str, device: str) -> None:
    """All have the same means, in several rounds a vector, and over 20 steps nothing is lost."""
    length, steps = 13_000, 20

    def program(group: Group) -> tuple[list[bytes], Any, F32]:
        kept, total, seen = np.zeros(length, np.float32), np.zeros(length), []
        there = torch.zeros(length, device=device)
        for vector in gradients(group.rank, steps, length):
            if group.rank == 1:
                tensor = torch.from_numpy(vector).to(device)
                found = group.average_as(OnDevice, tensor, there, lane=lane).result(20)
                assert found is tensor
                vector, kept = tensor.cpu().numpy(), there.cpu().numpy()
            else:
                group.average(vector, kept, lane=lane).result(20)
            seen.append(vector.tobytes())
            total += vector.astype(np.float64) * 3
        return seen, total, kept

    found = checked(Meeting(3, 16), program)
    assert all(seen == found[0][0] for seen, _, _ in found)
    given = sum(np.sum(gradients(rank, steps, length), axis=0, dtype=float) for rank in range(3))
    left = sum(kept.astype(np.float64) for _, _, kept in found)
    largest = np.max([np.abs(gradients(rank, steps, length)) for rank in range(3)])
    np.testing.assert_allclose(found[0][1] + left, given, rtol=1e-5, atol=largest * 1e-5)


def test_members_that_call_with_other_lanes_are_told() -> None:
    def program(group: Group) -> str:
        vector, residual = torch.ones(2000), torch.zeros(2000)
        if group.rank:
            future = group.average_as(OnDevice, vector, residual, lane="i16")
        else:
            future = group.average(vector.numpy(), residual.numpy(), lane="i8")
        with pytest.raises(CallMismatch) as error:
            future.result(20)
        assert (vector == 1).all() and not residual.any()
        return str(error.value)

    found = checked(Meeting(2), program)
    assert found[0] == found[1] and "average of 2,000 float32 in lanes of 16 bits" in found[0]


def test_after_a_loss_tensors_have_the_mean_over_those_that_are_left() -> None:
    length = 13_000  # 3 rounds a vector with lanes of 8 bits

    def program(group: Group) -> Any:
        vector = torch.full((length,), float(group.rank + 1))
        group.average_as(OnDevice, vector, torch.zeros(length)).result(20)
        return vector

    # One round in which ranks are agreed on, one of the vector.
    first, second, lost = checked(Meeting(3, 16, loses={3: 3}), program)
    assert isinstance(lost, GroupClosed) and torch.equal(first, second)
    torch.testing.assert_close(first[: 4 * 1440], torch.full((4 * 1440,), 2.0), rtol=0.02, atol=0)
    rest = first[4 * 1440 :]
    torch.testing.assert_close(rest, torch.full_like(rest, 1.5), rtol=0.02, atol=0)
