# SPDX-License-Identifier: Apache-2.0
"""A job's settings: a frozen dataclass with defaults, and what `--set key=value` makes of it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import JobError

LANES = ("i32", "i16", "i8")
EXCHANGES = ("auto", "broadcast", "stripes", "switch")
SYSTEMS = ("R", "S", "B")
MOST_SERVERS = 63  # of a network of 64 hosts, in which one trains
MOST_PUSHES = 2**31 - 1
SYNC_EVERY = (
    64  # pushes from one synchronisation to the next, where `sync_every` is not set (T of S4)
)
MIN_MICRO_BATCHES = 10  # R13
MOST_CHANNELS = 8  # of a step's plan
SCOPES = ("queue", "order")
EQUAL = "equal"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job can set; a job adds its own by deriving from it (`lr: float = 0.1`).

    batch: samples of a round, over all members; one for each at least.
    epochs, rounds: the job ends after so many, whichever comes first, or when its `done` says so.
    lane: integers on the wire: "i32", "i16" or "i8".
    rank: the gradients of matrices are exchanged as two factors of that rank, in two rounds a step. `lane` is "i32" and
        `quorum` 1 then, and the exchange is stripes. None: as they are.
    bucket_mb: gradients go out in buckets of so many MB (of float32), each as backward has made it. `quorum` is 1 then,
        and the exchange is stripes. None: in one, once backward has ended.
    priorities: the plan of a step has at most so many channels, 1 to 8, each with its own rounds and urgency; the
        exchange is stripes. None: no plan. With it `bucket_mb` is the room of all channels together. With servers the
        parameters are dealt out to so many channels: pushes go in the order of backward, pulls in that of forward.
    priority_scope: how far priorities reach: "queue", rounds of a plan come one after the other; "order", each channel
        has a round open.
    priority_cuts: with how many parameters before it, in the order in which the forward pass needs them, a less urgent
        channel begins: numbers that rise, separated by commas; or "equal", shares of about equal size. None: the lead
        measures the first steps, and works the shares out.
    exchange: how the gradients of a round become one sum: "broadcast", every host adds what the others broadcast;
        "stripes", each adds its part and sends the sum to all; "switch", the network's switch adds; "auto", the switch
        where the starting host believes one, else stripes.
    quorum: part of the batch after which a round closes (R13).
    micro_batches: parts in which a member works its share of the batch; at least 10 (R13). Where the quorum is 1 no
        round closes early, and 1 is enough.
    seed: of the initial weights, the order of the data and dropout.
    test_every: rounds between two tests; None: an epoch.
    test_batch: samples that are tested at once.
    threads: of PyTorch, per member.
    microbatch_seconds: a micro-batch lasts at least so long, by sleeping.
    slow: factor on that by host name; set as `slow.h4=4`. Without `microbatch_seconds` it is a
        factor on the time that the micro-batch took.
    save_gradients: keep every round's vectors in out/gradients/ROUND.npz, for checking the sums.
    clip: a member's gradient (the mean over its samples) is scaled to at most this L2 norm before it
        goes out; None: as it is.
    checkpoint_s: seconds between two checkpoints; 0: none.
    redeal: every host keeps all records, and they are dealt out again whenever hosts come or go
        (R21); False: each keeps its own part only (R6).
    alarm_below: with fewer members left than this part of those that began, the job is saved and stops (R22).
    admit: hosts that were not there at the start may come in (R20).
    network_access: the training programs have the hosts' network; otherwise they have none.
    average_all_buffers: float32 buffers are averaged over the hosts also where training does not seem to change them.
    trackers: where the lead's figures go beside its metrics, separated by commas: "tensorboard", or "module:Class" of a
        module beside job.py (`trainer.trackers`).
    tracker_dir: an absolute path on the lead's host, in which trackers write in place of the run's folder.
    stall_s: seconds after which a training program that is to work, and says nothing, is started again.
    system: "R", the ring: all hosts add up gradients, round by round; "S": servers hold the parameters, and workers
        push steps to them when they have one; "B": each step is averaged at the servers (`sync_every` is 1), and a
        worker gets half of the parameters from a partner. `quorum` is 1 with both.
    sync_every: S: pushes after which the steps of all workers are averaged (T); 1: each step is; 0: none ever. None:
        `SYNC_EVERY`, or the rounds between two tests where these are fewer.
    servers: S, B: how many hosts serve, the first ones, or their names, separated by commas.
    servers_train: S: servers have a share of the batch, too; their processors train while their kernels serve.
    staleness: S: a push counts 1 / staleness (S3); False: all count alike.
    partners: B: workers get half of the parameters from each other; False: all from the servers, in plain synchronous
        training with the same bits.
    """

    batch: int = 512
    epochs: float | None = None
    rounds: int | None = None
    lane: str = "i16"
    rank: int | None = None
    bucket_mb: float | None = None
    priorities: int | None = None
    priority_scope: str = "order"
    priority_cuts: str | None = None
    exchange: str = "auto"
    quorum: float = 0.9
    micro_batches: int = MIN_MICRO_BATCHES
    seed: int = 1
    test_every: int | None = None
    test_batch: int = 1000
    threads: int = 1
    microbatch_seconds: float = 0.0
    slow: Mapping[str, float] = field(default_factory=dict)
    save_gradients: bool = False
    clip: float | None = None
    checkpoint_s: float = 30.0
    redeal: bool = True
    alarm_below: float = 0.5
    admit: bool = False
    network_access: bool = False
    average_all_buffers: bool = False
    trackers: str | None = None
    tracker_dir: str | None = None
    stall_s: float = 60.0
    system: str = "R"
    sync_every: int | None = None
    servers: str = "1"
    servers_train: bool = False
    staleness: bool = True
    partners: bool = True

    @property
    def served(self) -> bool:
        """Whether servers hold the parameters."""
        return self.system != "R"

    @property
    def packed(self) -> bool:
        """Whether the model's branches are packed into two sets (B1)."""
        return self.system == "B"

    @property
    def cuts(self) -> tuple[int, ...]:
        """`priority_cuts` as numbers; none where shares are equal, or worked out."""
        cuts = self.priority_cuts
        return () if cuts in (None, EQUAL) else tuple(map(int, str(cuts).split(",")))

    def planned_rounds(self, records: int) -> int | None:
        """Rounds until `epochs` or `rounds` is reached, with `records` training samples."""
        plans = [] if self.rounds is None else [self.rounds]
        if self.epochs is not None:
            plans.append(max(1, round(self.epochs * self.rounds_of_epoch(records))))
        return min(plans, default=None)

    def rounds_between_tests(self, records: int) -> int:
        """`test_every`, or the rounds of an epoch of `records` training samples."""
        return self.test_every or self.rounds_of_epoch(records)

    def rounds_of_epoch(self, records: int) -> int:
        """Rounds that come nearest to one pass over `records` training samples."""
        return max(1, round(records / self.batch))


@dataclass(frozen=True)
class State:
    """How far the training is, for a job's `done`.

    round: training rounds committed. epoch: passes over the training data, in parts too. loss: this
    member's own in the last round. accuracy: of the last test (0 to 1; R15), None before the first;
    best: of all tests. seconds: since the first round. steps: of workers, where servers hold the parameters, beyond
    those of whole rounds.
    """

    round: int = 0
    epoch: float = 0.0
    loss: float | None = None
    accuracy: float | None = None
    best: float | None = None
    seconds: float = 0.0
    steps: int = 0


def merge(settings: Settings, overrides: Mapping[str, Any]) -> Settings:
    """The settings with `overrides` (values as JSON, or as the text of `key=value`) put in.

    Raises:
        JobError: an unknown key, or a value of the wrong kind or out of range.
    """
    hints = typing.get_type_hints(type(settings))
    names = {item.name for item in dataclasses.fields(settings) if item.init}
    changes: dict[str, Any] = {}
    slow = dict(settings.slow)
    for key, value in overrides.items():
        if key.startswith("slow."):
            slow[key.removeprefix("slow.")] = _convert(key, value, float)
        elif key == "slow" and isinstance(value, Mapping):
            slow.update((host, _convert(f"slow.{host}", f, float)) for host, f in value.items())
        elif key in names and key != "slow":
            changes[key] = _convert(key, value, hints[key])
        else:
            known = ", ".join(sorted(names - {"slow"} | {"slow.HOST"}))
            near = difflib.get_close_matches(key, names, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise JobError(f"unknown setting {key!r}; {meant}known are {known}")
    merged = implied(dataclasses.replace(settings, **changes, slow=slow))
    if merged.served and changes.get("quorum", 1.0) != 1:
        raise JobError(_wrong("quorum", changes["quorum"], f"1, as system is {merged.system}"))
    if merged.packed and changes.get("sync_every") not in (None, 1):
        raise JobError(_wrong("sync_every", changes["sync_every"], "1, as system is B"))
    check(merged)
    return merged


def implied(settings: Settings) -> Settings:
    """With what other settings imply."""
    if settings.rank is not None:
        return dataclasses.replace(settings, lane="i32", quorum=1.0)
    if settings.packed:
        return dataclasses.replace(settings, quorum=1.0, sync_every=1)
    buckets = settings.bucket_mb is not None and settings.priorities is None
    if buckets or settings.served:
        return dataclasses.replace(settings, quorum=1.0)
    return settings


def flat(settings: Settings) -> dict[str, Any]:
    """The settings as JSON with one level of keys (`slow.h4`): what `merge` takes."""
    values = {
        item.name: getattr(settings, item.name)
        for item in dataclasses.fields(settings)
        if item.name != "slow"
    }
    return values | {f"slow.{host}": factor for host, factor in settings.slow.items()}


def check(settings: Settings) -> None:
    """Refuse values out of range.

    Raises:
        JobError: with the setting, its value and the range.
    """
    for key in ("batch", "test_batch", "threads"):
        _demand(settings, key, getattr(settings, key) >= 1, "at least 1")
    for key in ("epochs", "rounds", "test_every", "clip", "rank", "bucket_mb"):
        value = getattr(settings, key)
        _demand(settings, key, value is None or value > 0, "more than 0")
    _demand(settings, "lane", settings.lane in LANES, " or ".join(LANES))
    _demand(settings, "exchange", settings.exchange in EXCHANGES, " or ".join(EXCHANGES))
    for key in ("rank", "bucket_mb"):  # steps of several rounds
        if getattr(settings, key) is not None:
            stripes = settings.exchange in ("auto", "stripes")
            _demand(settings, "exchange", stripes, f"auto or stripes, as {key} is set")
            whole = not settings.save_gradients
            _demand(settings, "save_gradients", whole, f"false, as {key} is set")
    if settings.bucket_mb is not None:
        _demand(settings, "rank", settings.rank is None, "none, as bucket_mb is set")
        _demand(settings, "clip", settings.clip is None, "none, as bucket_mb is set")
    _demand(settings, "priority_scope", settings.priority_scope in SCOPES, " or ".join(SCOPES))
    if settings.priorities is not None:
        _check_priorities(settings)
    elif settings.priority_cuts is not None:
        _demand(settings, "priority_cuts", False, "none, as priorities is not set")
    elif settings.priority_scope != "order":
        _demand(settings, "priority_scope", False, "order, as priorities is not set")
    _demand(settings, "quorum", 0 < settings.quorum <= 1, "over 0 and at most 1")
    _demand(settings, "alarm_below", 0 <= settings.alarm_below <= 1, "from 0 to 1")
    least = MIN_MICRO_BATCHES if settings.quorum < 1 else 1
    _demand(settings, "micro_batches", settings.micro_batches >= least, f"at least {least}")
    _demand(settings, "seed", 0 <= settings.seed < 2**63, "from 0 to 2^63 - 1")
    for key in ("microbatch_seconds", "checkpoint_s"):
        _demand(settings, key, getattr(settings, key) >= 0, "at least 0")
    _demand(settings, "stall_s", settings.stall_s >= 1, "at least 1")
    absolute = not settings.tracker_dir or os.path.isabs(settings.tracker_dir)
    _demand(settings, "tracker_dir", absolute, "an absolute path")
    for host, factor in settings.slow.items():
        if not factor >= 1:
            raise JobError(f"setting slow.{host} is {factor}; it must be at least 1")
    _demand(settings, "system", settings.system in SYSTEMS, " or ".join(SYSTEMS))
    few = settings.sync_every is None or 0 <= settings.sync_every <= MOST_PUSHES
    _demand(settings, "sync_every", few, f"from 0 to {MOST_PUSHES}")
    _demand(settings, "servers", _are_servers(settings.servers), _SERVERS)
    if settings.served:
        _check_served(settings)


def check_pushes(settings: Settings, between: int) -> None:
    """S4, S5: a test comes after a synchronisation, so these must come as often as tests.

    `between` two tests are so many rounds, and a round is one push of each worker. So this holds whoever leaves.

    Raises:
        JobError: T is set, and above that.
    """
    if settings.served and settings.sync_every is not None and settings.sync_every > between:
        raise JobError(
            f"setting sync_every is {settings.sync_every}; it must be at most {between}, as there is a test every "
            f"{between} rounds, which are {between} pushes if one worker is left: raise test_every, lower sync_every, "
            "or leave it out"
        )


def check_idle(settings: Settings, asked: Mapping[str, Any]) -> None:
    """Refuse a setting of servers that a user has asked for, and that does nothing in this system: it was forgotten.

    Raises:
        JobError: with the setting and the system.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(Settings)}
    idle = {"partners"} if not settings.packed else set()
    if not settings.served:
        idle |= {"sync_every", "servers", "servers_train", "staleness"}
    for key in sorted(idle & asked.keys()):
        value = getattr(settings, key)
        if value != defaults[key]:
            use = "B" if key == "partners" else "S or B" if key == "servers" else "S"
            raise JobError(
                f"setting {key} is {value!r}, and does nothing with system={settings.system}: set system={use} as well"
            )


def chosen_pushes(settings: Settings, between: int) -> tuple[Settings, str]:
    """S4: with a `sync_every` where servers hold the parameters and it is not set; and a text if it is no usual one.

    Args:
        between: rounds between two tests.
    """
    if not settings.served or settings.sync_every is not None:
        return settings, ""
    every = min(SYNC_EVERY, between)
    lowered = (
        f"sync_every is not set, and is {every} in place of {SYNC_EVERY}, as there is a test every "
        f"{between} rounds"
    )
    return dataclasses.replace(settings, sync_every=every), lowered if every < SYNC_EVERY else ""


def _check_priorities(settings: Settings) -> None:
    """What cannot be where a step has a plan."""
    assert settings.priorities is not None
    of = "as priorities is set"
    most = 1 <= settings.priorities <= MOST_CHANNELS
    _demand(settings, "priorities", most, f"from 1 to {MOST_CHANNELS}")
    cuts = settings.priority_cuts
    known = cuts in (None, EQUAL) or all(each.isdecimal() for each in str(cuts).split(","))
    few = known and len(settings.cuts) < settings.priorities
    _demand(
        settings,
        "priority_cuts",
        few,
        f"{EQUAL}, or fewer numbers than priorities ({settings.priorities}), separated by commas",
    )
    if settings.served:  # a step is whole before it goes out
        return
    stripes = settings.exchange in ("auto", "stripes")
    _demand(settings, "exchange", stripes, f"auto or stripes, {of}")
    _demand(settings, "save_gradients", not settings.save_gradients, f"false, {of}")
    for key in ("rank", "clip"):
        _demand(settings, key, getattr(settings, key) is None, f"none, {of}")


_SERVERS = f"a number from 1 to {MOST_SERVERS}, or names of hosts separated by commas, each once"


def _are_servers(text: str) -> bool:
    """Whether `servers` is a number of hosts, or a list of names."""
    names = text.split(",")
    if text.isdecimal():
        return 1 <= int(text) <= MOST_SERVERS
    return all(name and name == name.strip() for name in names) and len({*names}) == len(names)


def _check_served(settings: Settings) -> None:
    """What cannot be where servers hold the parameters."""
    of = f"as system is {settings.system}"
    if settings.packed:
        _demand(settings, "servers_train", not settings.servers_train, f"false, {of}")
    _demand(settings, "exchange", settings.exchange == "auto", f"auto, {of}")
    for key in ("rank", "bucket_mb"):
        _demand(settings, key, getattr(settings, key) is None, f"none, {of}")
    if settings.priorities is not None:
        _demand(settings, "priority_scope", settings.priority_scope == "order", f"order, {of}")
        equal = settings.priority_cuts in (None, EQUAL)
        _demand(settings, "priority_cuts", equal, f"none or {EQUAL}, {of}")
    _demand(settings, "save_gradients", not settings.save_gradients, f"false, {of}")
    # A server would keep its part of the data, and nobody would train on it.
    _demand(settings, "redeal", settings.redeal, f"true, {of}")
    if settings.test_every is not None:
        check_pushes(settings, settings.test_every)


def _demand(settings: Settings, key: str, right: bool, demand: str) -> None:
    if not right:
        raise JobError(_wrong(key, getattr(settings, key), demand))


def _wrong(key: str, value: Any, demand: str) -> str:
    return f"setting {key} is {value!r}; it must be {demand}"


def _convert(key: str, value: Any, hint: Any) -> Any:
    """`value` as the annotated type: bool, int, float, str, or one of these or None."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = types.NoneType in kinds
    kind = next((kind for kind in kinds if kind is not types.NoneType), str)
    if value is None or (optional and value in ("", "none", "null")):
        if optional:
            return None
        raise JobError(f"setting {key} cannot be none")
    try:
        return _read(value, kind)
    except (TypeError, ValueError):
        raise JobError(f"setting {key} is {value!r}; it must be {kind.__name__}") from None


def _read(value: Any, kind: Any) -> Any:
    if kind is bool:
        texts = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() not in texts:
            raise ValueError(value)
        return texts[str(value).lower()]
    if isinstance(value, bool):
        raise TypeError(value)
    if kind is int:
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError(value)
        return number
    if kind is float:
        real = float(value)
        if not math.isfinite(real):
            raise ValueError(value)
        return real
    if kind is str:
        return str(value)
    return kind(value)
