# SPDX-License-Identifier: Apache-2.0
"""`nicps.torch.overlap` in one process, with a group of one whose sums take their time (docs/pytorch.md)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nicps.errors import JobFailed, UsageProblem  # noqa: E402
from nicps.torch import elastic, overlap  # noqa: E402
from nicps.torch.planner import Planner  # noqa: E402
from tests.overlapped import (  # noqa: E402
    Slow,
    adam,
    bits,
    loss_of,
    made,
    sgd,
    train,
)

Overlap, Settings = overlap.__globals__["Overlap"], overlap.__globals__["Settings"]
pytestmark = pytest.mark.usefixtures("one_thread", "gloo")


def pair(group: Slow, settings: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Two equal models with their optimizers, one step old, and their handles."""
    models = [made(sgd) for _ in range(2)]
    handles = [Overlap(*each, group, settings) for each in models]
    for each in models:
        train(*each, 1)
    return models, handles


# ---- the same bits


@pytest.mark.parametrize(
    ("optimizer", "scope", "options"),
    [
        (sgd, "channels", {}),
        (adam, "channels", {"gradient_as_bucket_view": True}),
        (sgd, "queue", {"find_unused_parameters": True}),
    ],
)
def test_weights_are_those_of_plain_ddp(
    group: Slow, optimizer: Any, scope: str, options: Any
) -> None:
    model, made_by = made(optimizer, **options)
    plain, other = made(optimizer, **options)
    handle = Overlap(model, made_by, group, Settings("i32", 3, None, scope))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (made_by, other)]
    assert train(model, made_by, 9, schedules[0]) == train(plain, other, 9, schedules[1])
    assert handle.figures.steps == 8, "the first step is DDP's own"
    assert bits(model) == bits(plain)
    handle.close()
    assert train(model, made_by, 2, first=9) == train(plain, other, 2, first=9)
    assert bits(model) == bits(plain)


def test_a_handle_that_is_closed_has_no_part_in_what_hosts_that_come_in_make_necessary(
    group: Slow,
) -> None:
    """The garbage of one rank may be collected before that of another one, and all must make the same calls."""
    model, optimizer = made(sgd)
    former = Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    former.close()
    handle = Overlap(model, optimizer, group, Settings())
    assert elastic._renewed_of(group) == [handle]
    handle.close()


def test_hosts_that_have_come_in_hand_out_buffers_with_the_others(
    group: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a new host no forward pass has been without averaging yet, as that of a test is at the others."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    train(model, optimizer, 2)
    handed_out = list[int]()
    monkeypatch.setattr(model, "_sync_buffers", lambda: handed_out.append(1))
    for came, expected in ((False, 0), (True, 1)):
        with torch.no_grad():
            loss_of(model, 2)
        handed_out.clear()
        if came:
            handle.renew()
        loss_of(model, 3)
        assert len(handed_out) == expected
    handle.close()


def test_gradients_that_add_up_over_several_passes(group: Slow) -> None:
    """`no_sync` is that of the model, as with DDP."""
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    Overlap(model, optimizer, group, Settings(channels=2))
    for step in range(5):
        for each, by in ((model, optimizer), (plain, other)):
            by.zero_grad()
            with each.no_sync():
                loss_of(each, 10 * step).backward()
                loss_of(each, 10 * step + 1).backward()
            loss_of(each, 10 * step + 2).backward()
            by.step()
    assert bits(model) == bits(plain)


# ---- order, and what waits


def test_front_layers_are_on_the_most_urgent_channel(group: Slow) -> None:
    """Front is what the forward pass uses first, whatever the order of the names."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=3))
    assert handle.plan == ()
    train(model, optimizer, 1)
    assert group.channels == 4
    names, channels = zip(*handle.plan, strict=True)
    assert names[0].startswith("first.") and names[-1].startswith(("middle.", "last."))
    assert list(channels) == sorted(channels, reverse=True) and {*channels} == {0, 1, 2}
    group.order.clear()
    train(model, optimizer, 1)
    handle.wait()
    assert {channel for channel, _ in group.order} == {1, 2, 3}


def test_a_queue_takes_them_from_the_rear_to_the_front(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=3, scope="queue"))
    train(model, optimizer, 1)
    group.order.clear()
    train(model, optimizer, 1)
    handle.wait()
    assert [channel for channel, _ in group.order] == [1, 2, 3]


def test_a_call_on_all_channels_comes_behind_parts_that_wait_for_their_turn(
    group: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `State.sync` and the end of the group are: in front of them at one rank, and behind at another, all would wait
    for one another."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=3, scope="queue"))
    train(model, optimizer, 1)
    average, put = group.average, list[str]()

    def note(*args: Any, **options: Any) -> Any:
        put.append("part")
        return average(*args, **options)

    def note_all(_: object) -> Future[None]:
        put.append("all")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(group, "average", note)
    with monkeypatch.context() as patched:
        patched.setattr(group._workers, "put_together", note_all)
        group.held[1].clear()  # the first part's
        train(model, optimizer, 1)
        release = threading.Timer(0.2, group.held[1].set)
        release.start()
        group.admit().result(20)
        release.join()
    assert put == ["part"] * len(handle.plan) + ["all"]
    handle.close()
    assert not group.before_all


def test_a_second_model_comes_behind_parts_of_the_first_that_wait_for_their_turn(
    group: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ranks that let all parts out at once they stand in front of it, on every channel."""
    models, handles = pair(group, Settings(channels=3, scope="queue"))
    second = {id(each) for each in handles[1]._run.flowing._residuals}
    average, order = group.average, list[bool]()

    def note(vector: Any, residual: Any, **options: Any) -> Any:
        order.append(id(residual) in second)
        return average(vector, residual, **options)

    monkeypatch.setattr(group, "average", note)
    group.held[1].clear()  # the first part's
    train(*models[0], 1)
    release = threading.Timer(0.2, group.held[1].set)
    release.start()
    train(*models[1], 1)
    for handle in handles:
        handle.wait()
    release.join()
    assert order == [False] * 3 + [True] * 3


@pytest.mark.parametrize("scope", ["channels", "queue"])
def test_gradients_of_two_models_in_turn_are_refused(group: Slow, scope: str) -> None:
    """At a rank that measures their parts would be in another order than at the others."""
    models, handles = pair(group, Settings(channels=2, scope=scope))
    (model, optimizer), second = models
    front, rear = (part.parameters for part in handles[0]._run.flowing._parts)
    optimizer.zero_grad()
    loss = loss_of(model, 1)
    loss.backward(retain_graph=True, inputs=[*rear])
    train(*second, 2, first=1)
    with pytest.raises(UsageProblem, match="goes through two models in turn"):
        loss.backward(inputs=[*front])
    train(*second, 2, first=3)
    handles[1].close()
    with pytest.raises(UsageProblem, match="goes through two models in turn"):
        handles[0].close()
    train(model, optimizer, 1)


@pytest.mark.parametrize("scope", ["channels", "queue"])
def test_a_backward_pass_that_fails_holds_up_no_other_model(group: Slow, scope: str) -> None:
    models, handles = pair(group, Settings(channels=3, scope=scope))
    (model, optimizer), second = models
    handle = model.module.middle[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 1, first=1)
    handle.remove()
    plain = made(sgd)
    train(*plain, 4)
    train(*second, 3, first=1)
    assert bits(second[0]) == bits(plain[0])
    with pytest.raises(UsageProblem, match="has no gradient in this step"):
        train(model, optimizer, 1, first=2)
    handles[1].close()
    with pytest.raises(UsageProblem, match="has no gradient in this step"):
        handles[0].close()


@pytest.mark.parametrize("ends", ["close", "a call of all"])
def test_parts_of_a_step_that_never_gets_whole(group: Slow, ends: str) -> None:
    """At a rank that lets parts out one after the other the same of them go out as at the others."""
    went = []
    for scope in ("channels", "queue"):
        model, optimizer = made(sgd)
        handle = Overlap(model, optimizer, group, Settings("i32", 3, None, scope))
        train(model, optimizer, 1)
        front, middle, _ = (part.parameters for part in handle._run.flowing._parts)
        loss = loss_of(model, 1)
        group.order.clear()
        optimizer.zero_grad()
        loss.backward(inputs=[*front, *middle])
        if ends != "close":
            for settle in group.before_all:
                settle()
        handle.close()
        went.append(sorted(group.order))
        train(model, optimizer, 1)
    assert went[0] == went[1]
    assert {channel for channel, _ in went[0]} == {2, 3}


def test_a_handle_that_is_closed_in_a_backward_pass_waits_for_no_part_that_cannot_go_out(
    group: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part waits for the one behind it on its channel, in vain."""
    monkeypatch.setattr("nicps.torch.shares._LEAST_OPEN", 1)
    models, handles = pair(group, Settings(cuts=(4,)))
    model, optimizer = models[0]
    (_, (_, front), (_, behind), *_) = handles[0].plan
    assert front == behind
    optimizer.zero_grad()
    part = handles[0]._run.flowing._parts[1]
    loss_of(model, 1).backward(inputs=[*part.parameters])
    with pytest.raises(UsageProblem, match="not all gradients of this step"):
        handles[0].close()
    train(*models[1], 2, first=1)
    handles[1].close()


@pytest.mark.parametrize("counts", [(3, 2), (2, 3)])
def test_two_models_with_other_channels(group: Slow, counts: tuple[int, ...]) -> None:
    """The second takes none away from the first."""
    models = [made(sgd) for _ in counts]
    handles = [
        Overlap(*each, group, Settings(channels=count))
        for each, count in zip(models, counts, strict=True)
    ]
    plain = [made(sgd) for _ in counts]
    for first in range(0, 8, 2):
        for handle, each, other in zip(handles, models, plain, strict=True):
            train(*each, 2, first=first)
            train(*other, 2, first=first)
            handle.wait()  # in this group a part is a call on channel 0, too, and would wait for `plan`
    for (model, _), (other, _) in zip(models, plain, strict=True):
        assert bits(model) == bits(other)
    assert group.channels == 4


def test_the_forward_pass_begins_before_all_is_there(group: Slow) -> None:
    """The rear layers' part is held until the front ones have run."""
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    Overlap(model, optimizer, group, Settings(cuts=(4, 8)))  # while it is measured it would wait
    train(model, optimizer, 3)
    train(plain, other, 3)
    optimizer.zero_grad()
    loss = loss_of(model, 3)
    group.held[1].clear()
    loss.backward()
    optimizer.step()
    hook = model.module.first.register_forward_hook(lambda *_: group.held[1].set())
    train(plain, other, 1, first=3)
    assert not group.held[1].is_set(), "the step itself waits for nothing"
    assert train(model, optimizer, 1, first=4) == train(plain, other, 1, first=4)
    hook.remove()
    assert bits(model) == bits(plain)


def test_a_failure_comes_out_of_the_next_forward_pass(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    handle.wait()
    group.fails = JobFailed("the group is over here: h2 is gone")
    with pytest.raises(JobFailed, match="h2 is gone"):
        train(model, optimizer, 2, first=2)
    with pytest.raises(JobFailed, match="h2 is gone"):
        handle.close()


# ---- need first


def test_the_first_steps_are_measured_and_their_plan_is_agreed_on(group: Slow) -> None:
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    train(model, optimizer, 7)
    assert handle.figures.predicted_seconds is None
    train(model, optimizer, 3, first=7)
    assert 0 < handle.figures.predicted_seconds < 1
    train(plain, other, 10)
    assert bits(model) == bits(plain)
    assert {*dict(handle.plan).values()} <= {0, 1}


def test_a_plan_is_judged_once_it_has_settled(group: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the steps that made it, after thirty more, and every hundred; the weights stay those of plain DDP."""
    propose, proposed = Planner.propose, dict[int, Any]()

    def noted(planner: Planner, shares: Any, steps: int, hosts: int) -> Any:
        proposed[steps] = propose(planner, shares, steps, hosts)
        return proposed[steps]

    monkeypatch.setattr(Planner, "propose", noted)
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    train(model, optimizer, 120)
    train(plain, other, 120)
    assert bits(model) == bits(plain)
    assert list(proposed) == [7, 35, 107] and None not in proposed.values()
    assert handle.figures.predicted_seconds == round(proposed[107].seconds, 6)


def test_figures_tell_of_the_plan_in_force(group: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channels, and how long its steps take: the median, whatever else the script does between some of them."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(cuts=(4, 8)))
    train(model, optimizer, 1)
    assert (handle.figures.channels, handle.figures.step_seconds) == (3, None)
    for step, seconds in enumerate((7.0, 1.0, 90.0, 1.5, 1.25), 1):
        now[0] += seconds
        train(model, optimizer, 1, first=step)
    assert (
        handle.figures.step_seconds == 1.375
    )  # of 1, 90, 1.5 and 1.25: the first is none from step to step
    handle.close()
    assert (handle.figures.channels, handle.figures.step_seconds) == (0, None)


def test_cuts_by_hand_are_kept(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(cuts=(4, 8)))
    train(model, optimizer, 12)
    assert handle.figures.predicted_seconds is None
    names = [name for name, _ in model.module.named_parameters()]
    order = [
        name
        for prefix in ("first", "norm", "middle", "last")
        for name in names
        if name.startswith(prefix)
    ]
    assert handle.plan == ((order[0], 2), (order[4], 1), (order[8], 0))


# ---- residuals


def test_residuals_are_kept_with_a_checkpoint(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(lane="i8", channels=2))
    train(model, optimizer, 2)
    state = handle.state_dict()
    assert {name: each.numel() for name, each in state.items()} == {
        name: each.numel() for name, each in model.module.named_parameters()
    }
    changed = {name: torch.full_like(each, 0.5) for name, each in state.items()}
    handle.load_state_dict(changed)
    assert all((each == 0.5).all() for each in handle.state_dict().values())
    with pytest.raises(UsageProblem, match="it is that of another model"):
        handle.load_state_dict({"first.weight": torch.zeros(3)})
    train(model, optimizer, 2, first=2)
