# SPDX-License-Identifier: Apache-2.0
"""A script whose next forward pass runs while gradients are on their way (docs/pytorch.md).

model = DistributedDataParallel(model)
handle = nicps.torch.overlap(model, optimizer)  # the training loop stays as it is

The first step is DDP's own. In it each rank sees the order in which the forward pass needs the parameters. From then on
DDP averages nothing: gradients are exchanged part by part (`flowing.py`), and a parameter waits for its part
(`pending.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nicps.collective import Group
from nicps.collective.kinds import Array
from nicps.collective.operations import LANES
from nicps.errors import UsageProblem
from nicps.measuring import StepTimes
from nicps.torch import elastic
from nicps.torch.agreed import Agreed, agree, checksum, in_order
from nicps.torch.compress import Losses, Scaler, group_of
from nicps.torch.flowing import Flowing, Times
from nicps.torch.guarded import ReplacedStep
from nicps.torch.need import Uses
from nicps.torch.parts import Part, cut
from nicps.torch.pending import PendingSteps
from nicps.torch.planner import Planner
from nicps.torch.refused import check, check_join
from nicps.torch.shares import Shares
from nicps.torch.trainers import Flag, unwrapped

SCOPES = ("channels", "queue")
#: Of the group's channel that all other calls have: buffers in front of a forward pass must not wait behind bulk.
_URGENCY, _MOST_CHANNELS = 6, 6


def overlap(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    *,
    lane: str = "i32",
    channels: int = 4,
    cuts: Sequence[int] | None = None,
    scope: str = "channels",
    scaler: Scaler | None = None,
) -> Overlap:
    """Let gradients be averaged by nicps part by part, while the next forward pass runs; once, after the model was
    wrapped and the optimizer made.

    Args:
        model: on the backend `nicps`.
        optimizer: of all parameters that require a gradient; also in the wrapper of Accelerate or Lightning.
        lane: "i8", "i16" or "i32": bits of a number on the wire, with error feedback.
        channels: at most so many, 1 to 6; the front layers are on the most urgent one.
        cuts: with how many parameters before it a less urgent channel begins, in the order of need: then nothing is
            measured.
        scope: "queue": all parts one after the other, from the rear to the front, which has the same bits.
        scaler: the script's loss scaler, whose scale residuals follow.

    Raises:
        UsageProblem: the model, the optimizer or a setting is not suited.
    """
    group = group_of(model, "overlap")
    settings = Settings(lane, channels, None if cuts is None else tuple(cuts), scope)
    return Overlap(model, unwrapped(optimizer), group, settings, scaler)


@dataclass(frozen=True, slots=True)
class Settings:
    """As `overlap` has them."""

    lane: str = "i32"
    channels: int = 4
    cuts: tuple[int, ...] | None = None
    scope: str = "channels"

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise UsageProblem(f"lane must be one of {', '.join(LANES)}, not {self.lane!r}")
        if type(self.channels) is not int or not 1 <= self.channels <= _MOST_CHANNELS:
            raise UsageProblem(f"channels must be 1 to {_MOST_CHANNELS}, not {self.channels!r}")
        if self.cuts is not None and len(self.cuts) >= _MOST_CHANNELS:
            raise UsageProblem(
                f"cuts must be less than {_MOST_CHANNELS}, and there are {len(self.cuts)}"
            )
        if self.scope not in SCOPES:
            raise UsageProblem(f"scope must be one of {', '.join(SCOPES)}, not {self.scope!r}")

    @property
    def count(self) -> int:
        """Channels of parts."""
        return self.channels if self.cuts is None else len(self.cuts) + 1


@dataclass(frozen=True, slots=True)
class Figures:
    """What a handle has done.

    Attributes: `steps` in parts, and `numbers` exchanged, so far; `wait_seconds` and `update_seconds`, in which the
    script's threads have waited for parts, and have updated them; `predicted_seconds` of a step, None if that is not
    known. `channels`, how many the plan in force has, 0 without one; `step_seconds`, from one `step()` to the next, the
    median of the last hundred with that plan, None before the second one.
    """

    steps: int
    numbers: int
    wait_seconds: float
    update_seconds: float
    predicted_seconds: float | None
    channels: int = 0
    step_seconds: float | None = None


@dataclass(slots=True)
class _Run:
    """The steps with one plan. `times` of them; `ended`, when the last one was made or promised."""

    agreed: Agreed
    flowing: Flowing
    pending: PendingSteps
    flag: Flag
    times: StepTimes = field(default_factory=StepTimes)
    ended: float | None = None

    def note_step(self) -> None:
        """One was."""
        now = time.monotonic()
        if self.ended is not None:
            self.times.note(now - self.ended)
        self.ended = now

    def take_flag(self) -> None:
        """What the script has set at the model counts from now on."""
        if (syncs := self.flag.take()) is not None:
            self.pending.syncs = syncs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: what the script has set before does not count in it, and does again behind it."""
        self.take_flag()
        with self.pending.no_sync():
            yield


class Overlap(Losses):
    """The handle of a model whose steps are made part by part.

    Attributes: as `Losses`: `lost` and `on_loss`. `alike`: a checksum of what all ranks must have alike.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        group: Group,
        settings: Settings,
        scaler: Scaler | None = None,
    ) -> None:
        self._model, self._optimizer, self._settings = model, optimizer, settings
        self._scale: Callable[[], float] = scaler.get_scale if scaler is not None else lambda: 1.0
        self._named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        check(model, optimizer, self._named, settings.cuts)
        self._sizes = [parameter.numel() for _, parameter in self._named]
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self._named]
        self.alike = checksum(shapes, type(optimizer).__name__, settings)
        self._run: _Run | None = None
        self._planner: Planner | None = None
        self._kept: dict[str, Array] = {}  # residuals, between two plans
        self._spent, self._numbers = (0.0, 0.0), 0  # with former plans
        self._closed = False
        self._uses: Uses | None = Uses({id(parameter): name for name, parameter in self._named})
        self._sees = False  # `_uses` does, in a forward pass
        self._in_forward = False
        self._had_sync = True  # the last forward pass was one of DDP that averages
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        self._first: ReplacedStep | None = ReplacedStep(optimizer, self._first_step)
        super().__init__(group)
        elastic.note_renewed(group, self)

    # ---- what a script calls

    def wait(self) -> None:
        """Wait until all parameters are updated, if `step()` was called."""
        self._group.check_thread()
        if self._run is not None:
            self._run.pending.wait()

    @property
    def plan(self) -> tuple[tuple[str, int], ...]:
        """Parts, front first: the name of the first parameter of each, and its channel; a higher one is more urgent."""
        if self._run is None:
            return ()
        order, shares = self._run.agreed.order, self._run.agreed.shares
        firsts = (0, *shares.cuts)
        return tuple(
            (self._named[order[at]][0], channel)
            for at, channel in zip(firsts, shares.channels, strict=True)
        )

    @property
    def figures(self) -> Figures:
        """What was done so far."""
        run, (waited, updating), numbers = self._run, self._spent, self._numbers
        if run is None:
            return Figures(0, numbers, waited, updating, None)
        more = run.pending.spent
        agreed, times = run.agreed, run.times
        of_steps = agreed.steps, numbers + run.flowing.numbers
        spent = waited + more[0], updating + more[1]
        step = times.middle if len(times) else None
        return Figures(*of_steps, *spent, agreed.predicted_s, max(agreed.shares.channels) + 1, step)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's residuals by the parameter's name, float32 (n,), as of a loss scale of 1. Between steps only."""
        self.wait()
        found = self._run.flowing.residuals() if self._run is not None else self._kept
        return {name: torch.from_numpy(each.copy()) for name, each in found.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with what `state_dict` gave. Between steps only.

        Raises:
            UsageProblem: it is that of another model.
        """
        sizes = {name: parameter.numel() for name, parameter in self._named}
        for name, tensor in state.items():
            if tensor.numel() != sizes.get(name):
                raise UsageProblem(
                    f"the residual of {name} has {tensor.numel():,} numbers, and this model's parameter"
                    f" {sizes.get(name, 0):,}: it is that of another model"
                )
        agreed = self._run.agreed if self._run is not None else None
        self._end()
        self._kept = {
            name: tensor.to(torch.float32).numpy().copy() for name, tensor in state.items()
        }
        if agreed is not None:
            self._begin(agreed)

    def close(self) -> None:
        """Wait, and leave model and optimizer to DDP; it raises what has failed."""
        self._group.check_thread()
        if self._closed:
            return
        self._closed, self._averages = True, False
        elastic.forget_renewed(self._group, self)
        for hook in self._hooks:
            hook.remove()
        if self._first is not None:
            self._first.put_back()
        self._end()

    # ---- the first step, and hosts that come late

    def _first_step(self, closure: Callable[[], Any] | None) -> Any:
        """DDP has averaged the gradients. All ranks come here."""
        assert self._first is not None
        first = self._first
        found = first.whole() if closure is None else first.whole(closure)
        if self._run is None and not self._closed:
            first.put_back()
            self._agree_first()
        return found

    def _agree_first(self) -> None:
        self._look_away()  # a step in a forward pass
        seen = self._uses.order if self._uses is not None else ()
        order = in_order([name for name, _ in self._named], seen)
        sizes = [self._sizes[at] for at in order]
        cuts = self._settings.cuts
        if cuts is None:
            shares = Shares.equal(sizes, min(self._settings.channels, len(sizes)))
        else:
            shares = Shares.by_hand(sizes, cuts)
        agreed = agree(self._group, Agreed(order, shares), len(self._named), self.alike)
        assert agreed is not None
        count = self._settings.count
        if self._group.channels <= count:  # another model's parts may have more
            self._group.plan([_URGENCY, *range(count)]).result()
        self._begin(agreed)

    def forget(self) -> None:
        """This process comes back into the group: it takes the state of the others."""
        if self._run is not None:
            with contextlib.suppress(Exception):
                self._end()

    def renew(self) -> None:
        """Hosts have come in: they go on with the parts of the others. All ranks call it, with the same state."""
        mine = self._run.agreed if self._run is not None else None
        agreed = agree(self._group, mine, len(self._named), self.alike)
        self._had_sync = True  # at hosts that have come in no forward pass says otherwise
        if agreed is None or self._run is not None:
            return
        if self._first is not None:
            self._first.put_back()
        self._begin(agreed)

    # ---- one plan after the other

    def _begin(self, agreed: Agreed) -> None:
        """Make the steps of that plan from now on."""
        self._end()
        settings, group, shares = self._settings, self._group, agreed.shares
        self._uses = None
        named = [self._named[at] for at in agreed.order]
        parts = cut(named, shares.cuts)
        serial = settings.scope == "queue"
        how = settings.lane, self._kept, self._scale
        flowing = Flowing(group, parts, shares.channels, *how, serial=serial)
        module, optimizer = self._model.module, self._optimizer

        def offer(part: Part, vector: torch.Tensor) -> Future[Any]:
            flag.check()
            return flowing.offer(part, vector)

        pending = PendingSteps(module, optimizer, parts, offer, self._stepped)
        flag = Flag(self._model)  # only now: where parts are refused DDP goes on to average
        pending.syncs = flag.said
        self._run = run = _Run(agreed, flowing, pending, flag)
        group.before_all.append(flowing.settle)
        self._model.no_sync = run.no_sync  # type: ignore[method-assign]
        if self._planner is None and settings.cuts is None and not serial:
            width = LANES[settings.lane]
            self._planner = Planner(named, module, width, settings.channels, self._spent_now)
        if self._planner is not None:
            self._planner.enter(shares)

    def _end(self) -> None:
        """No more steps of that plan; what rounding has left over is kept."""
        run, self._run = self._run, None
        if run is None:
            return
        if self._planner is not None:
            self._planner.stop()
        self._group.before_all.remove(run.flowing.settle)
        run.flowing.cut_short()
        run.flag.give_back()
        self._model.__dict__.pop("no_sync", None)
        waited, updating = run.pending.spent
        self._spent = self._spent[0] + waited, self._spent[1] + updating
        self._numbers += run.flowing.numbers
        try:
            run.pending.close()
        finally:
            self._kept = run.flowing.residuals()

    def _stepped(self) -> None:
        """A step was made, or is promised. All ranks come here."""
        run, planner = self._run, self._planner
        assert run is not None
        run.note_step()
        if self._model._comm_hooks:
            raise UsageProblem(
                "a hook was registered at the model, which averages nothing any more: close the handle of overlap first"
            )
        run.agreed = agreed = replace(run.agreed, steps=run.agreed.steps + 1)
        if planner is None:
            return
        if self._in_forward:  # steps by hand in Lightning: what is measured around them is no pass
            planner.stop()
            self._planner = None
            return
        there = [rank for rank in range(self._group.size) if rank not in self._group.lost]
        if planner.agrees(agreed.steps):
            run.pending.wait()
            plan = planner.propose(agreed.shares, agreed.steps, len(there))
            mine = None
            if plan is not None:
                mine = replace(agreed, shares=plan.shares, predicted_s=plan.seconds)
            found = agree(self._group, mine, len(self._named), self.alike)
            if found is not None and found.shares != agreed.shares:
                self._begin(found)
            elif found is not None:
                run.agreed = found
        run = self._run
        assert run is not None
        first = there[:1] == [self._group.rank]
        run.flowing.serial = planner.step(run.agreed.steps, len(there), first=first)

    # ---- around a forward pass

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        check_join(self._model)
        run, self._in_forward = self._run, True
        if run is None:
            if self._uses is not None and not self._uses.order and torch.is_grad_enabled():
                self._sees = True
                self._uses.__enter__()  # type: ignore[no-untyped-call]
            return
        run.take_flag()
        self._model.require_forward_param_sync = self._had_sync
        if self._planner is not None and torch.is_grad_enabled():
            self._planner.begin_forward()

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        run, self._in_forward = self._run, False
        self._look_away()
        if run is None:
            return
        if output is None:  # it has failed
            return
        self._had_sync = torch.is_grad_enabled() and run.pending.syncs
        if self._planner is not None and torch.is_grad_enabled():
            self._planner.end_forward(self._settled, begins=run.pending.syncs)

    def _look_away(self) -> None:
        if self._uses is not None and self._sees:
            self._sees = False
            self._uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _settled(self) -> Mapping[int, Times]:
        """Wait for what is left of the step: the times of its parts."""
        assert self._run is not None
        self._run.pending.wait()
        return self._run.flowing.times

    def _spent_now(self) -> tuple[float, float]:
        return self._run.pending.spent if self._run is not None else (0.0, 0.0)
