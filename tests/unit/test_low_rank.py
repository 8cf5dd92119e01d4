# SPDX-License-Identifier: Apache-2.0
"""The hook of low rank, with members in threads in place of DDP and agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nicps.collective import Group
from nicps.errors import UsageProblem
from nicps.torch import factors
from nicps.torch.low_rank import LowRank
from tests.collectives import Meeting, together
from tests.far import Far, stage


@dataclass
class Bucket:
    """As DDP gives it."""

    place: int
    last: bool
    held: list[Any]
    flat: Any

    def index(self) -> int:
        return self.place

    def is_last(self) -> bool:
        return self.last

    def parameters(self) -> list[Any]:
        return self.held

    def buffer(self) -> Any:
        return self.flat


class Wrapped:
    """What the handle needs of a model that DDP has wrapped."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        torch.manual_seed(1)
        self.module = torch.nn.Sequential(torch.nn.Linear(90, 60), torch.nn.Linear(60, 70))
        self.module.to(dtype)
        self.dtype = dtype

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = lambda bucket: hook(state, bucket)

    def backward(self, gradients: Any, buckets: int) -> Any:
        """Through the hook in so many buckets, in DDP's order: what the optimizer sees, (n,)."""
        parameters = list(reversed(list(self.module.parameters())))
        per = len(parameters) // buckets
        flat, at, made = gradients.clone().to(self.dtype), 0, []
        for k in range(buckets):
            held = parameters[k * per : (k + 1) * per]
            size = sum(p.numel() for p in held)
            made.append(Bucket(k, k == buckets - 1, held, flat[at : at + size]))
            at += size
        futures = [self.hook(bucket) for bucket in made]
        return torch.cat([future.wait() for future in futures])


NUMBERS = 90 * 60 + 60 + 60 * 70 + 70


def flat_of(step: int, rank: int) -> Any:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(100 * step + rank))


def steps(group: Group, rank: int, buckets: Iterator[int], handle_rank: int = 2) -> Any:
    model = Wrapped()
    handle = LowRank(model, group, handle_rank, lane="i32")
    found = [model.backward(flat_of(k, rank), n) for k, n in enumerate(buckets)]
    return handle, found


def test_all_factors_go_in_two_rounds_whatever_the_buckets() -> None:
    """One bucket, and several of which DDP makes others after the first step: the same result."""

    def program(group: Group) -> Any:
        counted: list[int] = []
        call = group.average
        group.average = lambda v, *a, lane: counted.append(len(v)) or call(v, *a, lane=lane)  # type: ignore
        return *steps(group, group.rank, iter((4, 1, 2, 2))), counted

    several = together(Meeting(3), program)
    one = together(Meeting(3), lambda group: steps(group, group.rank, iter((1, 1, 1, 1))))
    for handle, found, counted in several:
        assert counted == [2 * 360, 3 * 360] * 4, "each begins with a fragment"
        assert all(torch.equal(a, b) for a, b in zip(found, several[0][1], strict=True))
        assert handle.figures.numbers == 4 * NUMBERS
    for k in range(4):
        torch.testing.assert_close(several[0][1][k], one[0][1][k], atol=1e-4, rtol=1e-4)
    mean = sum(flat_of(0, rank) for rank in range(3)) / 3
    torch.testing.assert_close(several[0][1][0][:70], mean[:70])  # a bias, as it is


def test_in_the_warmup_gradients_are_averaged_in_lanes() -> None:
    """What their rounding leaves over goes with the first factors: nothing of a bias is lost."""

    def program(group: Group) -> Any:
        counted: list[str] = []
        call = group.average
        group.average = lambda v, *a, lane: counted.append(lane) or call(v, *a, lane=lane)  # type: ignore
        model = Wrapped()
        handle = LowRank(model, group, 2, None, 2, "i32")
        found = [model.backward(flat_of(k, group.rank), n) for k, n in enumerate((4, 1, 2))]
        assert counted.count("i32") == 2, "the first factors are of the third step"
        late = LowRank(Wrapped(), group, 2, None, 2)
        late.warm_start.load_state_dict(handle.warm_start.state_dict())
        assert late.warm_start.steps == 2
        return found

    ranks = together(Meeting(3), program)
    for k in range(3):
        assert all(torch.equal(found[k], ranks[0][k]) for found in ranks)
    means = [sum(flat_of(k, rank) for rank in range(3)) / 3 for k in range(3)]
    for k in range(2):
        torch.testing.assert_close(ranks[0][k], means[k], atol=0.1, rtol=0)
        assert not torch.allclose(ranks[0][k], means[k], atol=1e-4, rtol=0)
    whole = sum(ranks[0]) - sum(means)
    torch.testing.assert_close(whole[:70], torch.zeros(70), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lane", ["i8", "i16", "i32"])
def test_narrow_lanes_lose_nothing(lane: str) -> None:
    """What was applied, and the mean of what is left over at the ranks, are the mean of all gradients."""

    def program(group: Group) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, lane=lane)
        found = [model.backward(flat_of(k, group.rank), 2) for k in range(12)]
        left = handle.state_dict()["error"]
        names = [name for name, _ in model.module.named_parameters()]
        return found, torch.cat([left[name].reshape(-1) for name in reversed(names)])

    ranks = together(Meeting(3), program)
    assert all(
        torch.equal(a, b) for found, _ in ranks for a, b in zip(found, ranks[0][0], strict=True)
    )
    given = sum(flat_of(k, rank) for k in range(12) for rank in range(3)) / 3
    left = sum(each for _, each in ranks) / 3
    torch.testing.assert_close(sum(ranks[0][0]) + left, given, atol=1e-4, rtol=0)
    biases = left[:70].abs().max()
    assert biases < {"i8": 0.1, "i16": 1e-3, "i32": 1e-6}[lane] and left[70:].abs().max() > 1.0
    assert biases > 1e-4 or lane != "i8"


@pytest.mark.parametrize("least", [1e-2, 1e-4])
def test_a_matrix_of_small_gradients_is_not_lost_beside_one_of_large_ones(least: float) -> None:
    """Their factors share no fragment, so in 8 bits the small one follows its gradients as it does in 32."""

    def program(group: Group, lane: str) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, lane=lane)
        found = []
        for k in range(20):
            # As DDP has them: the second layer's bias and matrix, and then the first one's.
            layers = flat_of(0, 0) + 0.3 * flat_of(k + 1, group.rank)
            layers[70 + 4200 :] *= least
            found.append(model.backward(layers, 1)[70 + 4200 + 60 :])
        return found, handle.state_dict()["error"]["0.weight"].norm()

    narrow, wide = (
        together(Meeting(2), lambda g, lane=lane: program(g, lane))[0] for lane in ("i8", "i32")
    )
    assert all(each.any() for each in narrow[0])
    assert narrow[1] < 1.2 * wide[1]


def test_a_parameter_may_have_been_frozen_and_a_script_may_have_other_defaults() -> None:
    def program(group: Group) -> Any:
        model = Wrapped()
        bias = model.module[0].bias
        bias.requires_grad_(False)
        torch.set_default_dtype(torch.float64)
        try:
            handle = LowRank(model, group, 2, lane="i32")
        finally:
            torch.set_default_dtype(torch.float32)
        bias.requires_grad_(True)
        return model.backward(flat_of(0, group.rank), 1), set(handle.state_dict()["error"])

    for found, names in together(Meeting(1), program):
        torch.testing.assert_close(found[:70], flat_of(0, 0)[:70])
        assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_warmup_that_is_rolled_back_goes_on() -> None:
    """All ranks load a checkpoint of the warm-up after its end: they, and a late one, average in lanes again."""

    def program(group: Group) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, None, 2)
        model.backward(flat_of(0, group.rank), 1)
        saved = handle.state_dict()
        first = [model.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        handle.load_state_dict(saved)
        again = [model.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        handle.forget()
        error = handle.state_dict()["error"]
        assert not any(each.any() for each in error.values())
        return all(torch.equal(*pair) for pair in zip(first, again, strict=True))

    assert together(Meeting(2), program) == [True, True]


def test_a_step_that_is_skipped_keeps_what_the_warmup_has_left_over() -> None:
    def program(group: Group) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, None, 1)
        model.backward(flat_of(0, group.rank), 1)
        left = handle.state_dict()["residual"]
        bad = flat_of(1, group.rank)
        bad[3] = float("inf")
        model.backward(bad, 1)
        error = handle.state_dict()["error"]
        return all(torch.equal(e.reshape(-1), left[name]) and e.any() for name, e in error.items())

    assert together(Meeting(2), program) == [True, True]


def test_buckets_of_a_gpu_go_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = stage(monkeypatch)

    def program(group: Group) -> Any:
        near, far = Wrapped(), Wrapped()
        for model in (near, far):
            LowRank(model, group, 2)
        gradients = flat_of(0, group.rank)
        found = far.backward(gradients.as_subclass(Far), 2)
        return torch.equal(near.backward(gradients, 2), found.as_subclass(torch.Tensor))

    assert together(Meeting(2), program) == [True, True]
    assert copied == [torch.float32] * 8  # two buckets of each rank, there and back


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 3])
def test_a_checkpoint_goes_on_where_it_was(
    warmup_steps: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits, though an error that is asked for is computed sooner."""
    if compiled:
        pytest.importorskip("numba")
        monkeypatch.setattr(factors, "LEAST_NUMBERS", 0)

    def program(group: Group) -> Any:
        model, other = Wrapped(), Wrapped()
        handle = LowRank(model, group, 2, None, warmup_steps)
        model.backward(flat_of(0, group.rank), 1)
        saved = {k: {n: t.clone() for n, t in v.items()} for k, v in handle.state_dict().items()}
        first = [model.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        again = LowRank(other, group, 2, None, warmup_steps)
        again.load_state_dict(saved)
        second = [other.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        with pytest.raises(UsageProblem, match="that of another model or rank"):
            LowRank(Wrapped(), group, 1).load_state_dict(saved)
        return all(torch.equal(*pair) for pair in zip(first, second, strict=True))

    assert together(Meeting(2), program) == [True, True]


def test_a_checkpoint_without_residuals_of_the_rest_is_taken() -> None:
    """As they were before factors had narrow lanes."""

    def program(group: Group) -> Any:
        model, other = Wrapped(), LowRank(Wrapped(), group, 2)
        handle = LowRank(model, group, 2)
        model.backward(flat_of(0, group.rank), 1)
        other.forget()
        saved = handle.state_dict()
        biases = [name for name in saved["error"] if name.endswith("bias")]
        old = {name: each for name, each in saved["error"].items() if name not in biases}
        other.load_state_dict({**saved, "error": old})
        found = other.state_dict()["error"]
        assert all(torch.equal(found[name], each) for name, each in old.items())
        return len(biases), any(found[name].any() for name in biases)

    assert together(Meeting(2), program) == [(2, False)] * 2


def test_a_scaler_s_overflow_reaches_all_and_errors_follow_its_scale() -> None:
    class Scale:
        now = 1.0

        def get_scale(self) -> float:
            return self.now

    def program(group: Group) -> Any:
        scale, model = Scale(), Wrapped()
        handle = LowRank(model, group, 2, scale)
        model.backward(flat_of(0, group.rank), 1)
        before = handle.state_dict()["error"]
        bad = flat_of(1, group.rank)
        if group.rank == 1:
            bad[3] = float("inf")  # of a bias: no matrix knows it
        told = model.backward(bad, 1).isfinite().all().item()
        kept = all(torch.equal(t, before[n]) for n, t in handle.state_dict()["error"].items())
        scale.now = 4.0
        big = model.backward(flat_of(2, group.rank) * 4.0, 1) / 4.0
        return told, kept, big

    plain = together(Meeting(2), lambda group: _without_overflow(group))
    for (told, kept, big), expected in zip(together(Meeting(2), program), plain, strict=True):
        assert not told and kept
        torch.testing.assert_close(big, expected, atol=1e-5, rtol=1e-5)


def _without_overflow(group: Group) -> Any:
    model = Wrapped()
    LowRank(model, group, 2)
    model.backward(flat_of(0, group.rank), 1)
    return model.backward(flat_of(2, group.rank), 1)


def test_a_group_that_ends_is_an_error_out_of_every_future() -> None:
    def program(group: Group) -> Any:
        model = Wrapped()
        LowRank(model, group, 2)
        group.close()
        with pytest.raises(RuntimeError, match="the group is closed"):
            model.backward(flat_of(0, group.rank), 2)
        return True

    assert together(Meeting(2), program) == [True, True]


def test_wrong_settings_are_refused() -> None:
    for rank in (0, -1, True, 1.5):
        with pytest.raises(UsageProblem, match="rank must be a whole number from 1 on"):
            LowRank(Wrapped(), None, rank)  # type: ignore[arg-type]
    for steps_ in (-1, 2.5, True):
        with pytest.raises(UsageProblem, match="warmup_steps must be a whole number from 0 on"):
            LowRank(Wrapped(), None, 1, None, steps_)  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match=r"is torch\.float64"):
        LowRank(Wrapped(torch.float64), None, 1)  # type: ignore[arg-type]
