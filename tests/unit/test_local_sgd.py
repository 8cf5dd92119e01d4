# SPDX-License-Identifier: Apache-2.0
"""Models that are averaged every few steps: their changes, in narrow lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from nicps.collective import Group, GroupClosed  # noqa: E402
from nicps.errors import UsageProblem  # noqa: E402
from nicps.torch import ChangeAverager, elastic  # noqa: E402
from tests.averages import checked  # noqa: E402
from tests.collectives import Meeting  # noqa: E402


def averager(group: Group, period: int = 3, warmup_steps: int = 0, **more: Any) -> Any:
    process_group: Any = SimpleNamespace(group=group)
    return ChangeAverager(period, warmup_steps, process_group, **more)


def model(seed: int = 1, dtype: Any = None) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3)).to(dtype)


def drift(parameters: Any, random: Any, size: float = 0.01) -> None:
    """A step of this rank's own."""
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn(parameter.shape, generator=random) * size


def flat(parameters: Any) -> Any:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lane", ["i8", "i16", "i32"])
def test_all_ranks_have_the_mean_of_their_models(lane: str, dtype: Any) -> None:
    """Every third step, from the warm-up's end on; in between each has its own."""

    def program(group: Group) -> list[tuple[Any, Any]]:
        here, parameters = averager(group, 3, 2, lane=lane), list(model(dtype=dtype).parameters())
        random = torch.Generator().manual_seed(group.rank)
        found = []
        for _ in range(12):
            if here.local:  # else the ranks average their gradients
                drift(parameters, random)
            before = flat(parameters)
            here.average_parameters(parameters)
            found.append((before, flat(parameters)))
        return found

    ranks = checked(Meeting(3), program)
    for step, steps in enumerate(zip(*ranks, strict=True)):
        befores, afters = zip(*steps, strict=True)
        if step < 2 or (step - 2) % 3:
            assert all(torch.equal(*pair) for pair in zip(befores, afters, strict=True))
            continue
        assert all(torch.equal(after, afters[0]) for after in afters)
        mean = torch.stack([before.float() for before in befores]).mean(0)
        torch.testing.assert_close(afters[0].float(), mean, rtol=0, atol=2e-3)
    assert not torch.equal(ranks[0][3][1], ranks[1][3][1])


def test_what_rounding_leaves_over_is_added_later() -> None:
    """A change that 8 bits beside a large one do not hold, again and again: it comes to its sum in the end."""

    def program(group: Group) -> Any:
        parameter = nn.Parameter(torch.zeros(100))
        here = averager(group)
        here.average([parameter])
        for step in range(300):
            with torch.no_grad():
                parameter[0] += (-1.0) ** step
                parameter[1] += 0.001
            here.average([parameter])
        return parameter.detach()

    first, second = checked(Meeting(2), program)
    assert torch.equal(first, second)
    assert float(first[1]) == pytest.approx(0.3, abs=0.01)


def test_groups_of_an_optimizer_and_what_is_frozen() -> None:
    def program(group: Group) -> Any:
        made = model()
        made[0].bias.requires_grad_(False)
        with torch.no_grad():
            made[0].bias.fill_(float(group.rank))
            made[1].bias.fill_(float(group.rank))
        optimizer = torch.optim.SGD(
            [{"params": made[0].parameters()}, {"params": made[1].parameters()}]
        )
        averager(group).average_parameters(optimizer.param_groups)
        return made[0].bias.detach(), made[1].bias.detach()

    for rank, (frozen, trained) in enumerate(checked(Meeting(3), program)):
        assert (frozen == rank).all() and (trained == 1).all()


def test_after_hosts_have_come_in_the_models_themselves_are_averaged() -> None:
    """One of them knows nothing of what was averaged before."""

    def program(group: Group) -> Any:
        here, parameters = averager(group, 2), list(model(group.rank).parameters())
        assert elastic._renewed_of(group) == [here]
        here.load_state_dict({"step": 4})
        befores = flat(parameters)
        here.average_parameters(parameters)
        first = flat(parameters)
        if group.rank == 1:
            here.load_state_dict(here.state_dict())
        else:
            here.renew()
        drift(parameters, torch.Generator().manual_seed(group.rank))
        here.average_parameters(parameters)
        assert torch.equal(first, flat(parameters)) is False
        drifted = flat(parameters)
        here.average_parameters(parameters)
        return befores, first, drifted, flat(parameters)

    ranks = checked(Meeting(3), program)
    for before, after in ((0, 1), (2, 3)):
        mean = torch.stack([rank[before] for rank in ranks]).mean(0)
        assert all(torch.equal(rank[after], ranks[0][after]) for rank in ranks)
        torch.testing.assert_close(ranks[0][after], mean, rtol=0, atol=1e-6)


def test_a_model_that_is_loaded_again_does_not_keep_what_was_not_finite() -> None:
    """Also if the script sets `step`, as `PostLocalSGDOptimizer` does, or does not tell the averager."""

    def program(group: Group, told: bool) -> Any:
        parameter = nn.Parameter(torch.ones(500))
        here = averager(group)
        here.average([parameter])
        with torch.no_grad():
            parameter[3] = float("nan") if group.rank else 1.0
        here.average([parameter])
        marred = bool(parameter.isnan().any())
        if told:
            here.step = 0
        with torch.no_grad():
            parameter.fill_(2.0 + group.rank)
        here.average([parameter])
        return marred, parameter.detach()

    for told in (True, False):
        for marred, parameter in checked(Meeting(2), lambda group, told=told: program(group, told)):
            assert marred and (parameter == 2.5).all()


def test_an_average_in_the_warmup_does_not_round_those_after_it() -> None:
    def program(group: Group) -> Any:
        parameter, random = nn.Parameter(torch.zeros(500)), torch.Generator().manual_seed(1)
        here = averager(group, 4, 2)
        here.average([parameter])
        for _ in range(3):
            drift([parameter], random)  # the same at all ranks
            before = flat([parameter])
            here.average_parameters([parameter])
        return before, flat([parameter])

    for before, after in checked(Meeting(2), program):
        assert torch.equal(before, after)


def test_the_mean_is_over_those_that_are_left() -> None:
    def program(group: Group) -> Any:
        parameter = nn.Parameter(torch.zeros(2000))
        here = averager(group)
        here.average([parameter])
        with torch.no_grad():
            parameter += group.rank + 1
        here.average([parameter])
        return parameter.detach()

    # Rounds: ranks are agreed on, the first average, its rest; the third member is lost after these.
    first, second, lost = checked(Meeting(3, loses={3: 3}), program)
    assert isinstance(lost, GroupClosed) and torch.equal(first, second)
    torch.testing.assert_close(first, torch.full((2000,), 1.5), rtol=0.02, atol=0)


def test_bad_settings_are_refused() -> None:
    def program(group: Group) -> None:
        with pytest.raises(UsageProblem, match="lane must be one of i8, i16, i32, not 'i4'"):
            averager(group, lane="i4")
        with pytest.raises(ValueError, match="period"):
            averager(group, 0)
        with pytest.raises(UsageProblem, match="needs the process group of nicps"):
            ChangeAverager(4, 0, SimpleNamespace())  # type: ignore[arg-type]
        wide = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        with pytest.raises(UsageProblem, match=r"a parameter of \(2, 3\) is torch.float64 on cpu"):
            averager(group).average([wide])

    checked(Meeting(1), program)
