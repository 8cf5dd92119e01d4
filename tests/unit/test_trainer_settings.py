# SPDX-License-Identifier: Apache-2.0
"""A job's settings, and what `--set key=value` does to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from trainer import JobError, Settings
from trainer.settings import flat, merge


@dataclass(frozen=True, kw_only=True)
class Mine(Settings):
    lr: float = 0.1
    hidden: int | None = None
    fast: bool = False


def test_values_come_as_json_or_as_text() -> None:
    merged = merge(
        Mine(epochs=2),
        {"quorum": "0.75", "seed": 3, "slow.h4": "4", "lr": 1, "fast": "true", "hidden": "8"},
    )
    assert (merged.quorum, merged.seed, merged.slow) == (0.75, 3, {"h4": 4.0})
    assert (merged.lr, merged.fast, merged.hidden) == (1.0, True, 8)
    assert isinstance(merged, Mine)


def test_flat_settings_survive_json_and_merge() -> None:
    settings = merge(Mine(epochs=2), {"slow.h2": 2, "test_every": 5})
    again = merge(Mine(), json.loads(json.dumps(flat(settings))))
    assert again == settings
    assert flat(settings)["slow.h2"] == 2.0


def test_none_unsets() -> None:
    assert merge(Settings(epochs=2, rounds=9), {"epochs": "none"}).epochs is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "quorom",
            1,
            r"unknown setting 'quorom'; did you mean quorum\? known are admit, alarm_below, .*slow.HOST",
        ),
        ("quorum", 0, "quorum is 0.0; it must be over 0 and at most 1"),
        ("quorum", 1.5, "quorum is 1.5"),
        ("quorum", "high", "quorum is 'high'; it must be float"),
        ("quorum", "nan", "quorum is 'nan'"),
        ("batch", 0, "batch is 0; it must be at least 1"),
        ("batch", 1.5, "batch is 1.5; it must be int"),
        ("batch", True, "batch is True; it must be int"),
        ("batch", None, "batch cannot be none"),
        ("epochs", -1, "epochs is -1.0; it must be more than 0"),
        ("lane", "i64", "lane is 'i64'; it must be i32 or i16 or i8"),
        ("clip", 0, "clip is 0.0; it must be more than 0"),
        ("checkpoint_s", -1, "checkpoint_s is -1.0; it must be at least 0"),
        ("stall_s", 0.5, "stall_s is 0.5; it must be at least 1"),
        ("redeal", "perhaps", "redeal is 'perhaps'; it must be bool"),
        ("micro_batches", 5, "micro_batches is 5; it must be at least 10"),
        ("seed", -1, "seed is -1"),
        ("save_gradients", "maybe", "save_gradients is 'maybe'; it must be bool"),
        ("slow.h4", 0.5, "slow.h4 is 0.5; it must be at least 1"),
        ("slow.h4", "x", "slow.h4 is 'x'; it must be float"),
        ("slow", 3, "unknown setting 'slow'"),
    ],
)
def test_refuses(key: str, value: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        merge(Settings(epochs=1), {key: value})


def test_one_micro_batch_is_enough_where_no_round_closes_early() -> None:
    whole = {"quorum": 1, "micro_batches": 1}
    assert merge(Settings(epochs=1), whole).micro_batches == 1
    with pytest.raises(JobError, match="micro_batches is 0; it must be at least 1"):
        merge(Settings(epochs=1), whole | {"micro_batches": 0})
    with pytest.raises(JobError, match="micro_batches is 1; it must be at least 10"):
        merge(Settings(epochs=1), whole | {"quorum": 0.99})


S = {"system": "S", "sync_every": 4}


def test_servers_imply_a_whole_quorum() -> None:
    merged = merge(Settings(epochs=1), {**S, "servers": 2, "micro_batches": 1, "staleness": "no"})
    assert merged.served and merged.quorum == 1.0 and merged.servers == "2"
    assert not merged.staleness and merged.sync_every == 4
    assert merge(Settings(epochs=1), json.loads(json.dumps(flat(merged)))) == merged
    assert merge(Settings(epochs=1), {**S, "servers_train": True}).servers_train
    for servers in ("63", "h1", "h1,h2", "2h"):
        assert merge(Settings(epochs=1), {**S, "servers": servers}).servers == servers


def test_partners_imply_that_each_step_is_averaged() -> None:
    """B4, with or without partners; in a job whose own settings say nothing of it, too."""
    unset = {"system": "B", "sync_every": "none"}
    for settings in ({"system": "B"}, unset, {"system": "B", "partners": "no", "sync_every": 1}):
        merged = merge(Settings(epochs=1), settings)
        assert merged.packed and merged.served and (merged.sync_every, merged.quorum) == (1, 1.0)
        assert merge(Settings(epochs=1), json.loads(json.dumps(flat(merged)))) == merged
    assert not merge(Settings(epochs=1), S).packed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system": "P"}, "system is 'P'; it must be R or S or B"),
        ({"system": "B", "sync_every": 4}, "sync_every is 4; it must be 1, as system is B"),
        ({"system": "B", "quorum": 0.9}, "quorum is 0.9; it must be 1, as system is B"),
        (
            {"system": "B", "servers_train": True},
            "servers_train is True; it must be false, as system is B",
        ),
        ({**S, "sync_every": -1}, "sync_every is -1; it must be from 0 to 2147483647"),
        ({**S, "quorum": 0.9}, "quorum is 0.9; it must be 1, as system is S"),
        ({**S, "exchange": "stripes"}, "exchange is 'stripes'; it must be auto, as system is S"),
        ({**S, "rank": 2}, "rank is 2; it must be none, as system is S"),
        ({**S, "bucket_mb": 5}, "bucket_mb is 5.0; it must be none, as system is S"),
        ({**S, "priorities": 9}, "priorities is 9; it must be from 1 to 8"),
        (
            {**S, "priorities": 2, "priority_scope": "queue"},
            "priority_scope is 'queue'; it must be order, as system is S",
        ),
        (
            {**S, "priorities": 2, "priority_cuts": "3"},
            "priority_cuts is '3'; it must be none or equal, as system is S",
        ),
        ({**S, "priorities": 2, "exchange": "stripes"}, "exchange is 'stripes'; it must be auto"),
        ({**S, "save_gradients": True}, "save_gradients is True; it must be false, as system is S"),
        ({**S, "redeal": False}, "redeal is False; it must be true, as system is S"),
        ({**S, "test_every": 3}, "sync_every is 4; it must be at most 3, as there is a test every"),
        *(
            ({**S, "servers": servers}, f"servers is {servers!r}; it must be a number from 1 to 63")
            for servers in ("0", "64", "", "h1,,h2", "h1, h2", "h1,h1")
        ),
    ],
)
def test_refuses_what_servers_cannot_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        merge(Settings(epochs=1), settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"priorities": 9}, "priorities is 9; it must be from 1 to 8"),
        ({"exchange": "broadcast"}, "exchange is 'broadcast'; it must be auto or stripes"),
        ({"rank": 2}, "rank is 2; it must be none, as priorities is set"),
        ({"clip": 1.0}, "clip is 1.0; it must be none, as priorities is set"),
        ({"save_gradients": True}, "save_gradients is True; it must be false, as priorities is"),
        ({"priority_scope": "sender"}, "priority_scope is 'sender'; it must be queue or order"),
        ({"priority_cuts": "3,5"}, "priority_cuts is '3,5'; it must be equal, or fewer numbers"),
        ({"priority_cuts": "front"}, "priority_cuts is 'front'; it must be equal, or fewer"),
        ({"priorities": None, "priority_cuts": "3"}, "priority_cuts is '3'; it must be none, as"),
        (
            {"priorities": None, "priority_scope": "queue"},
            "priority_scope is 'queue'; it must be order, as",
        ),
    ],
)
def test_refuses_what_a_plan_cannot_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        merge(Settings(epochs=1), {"priorities": 2, **settings})


@pytest.mark.parametrize("system", ["S", "B"])
def test_servers_can_have_priorities(system: str) -> None:
    """A step is whole before it goes out: so a gradient can be clipped."""
    of = {"system": system, "priorities": 3, "priority_cuts": "equal", "clip": 1.0}
    merged = merge(Settings(epochs=1), of)
    assert (merged.priorities, merged.quorum, merged.priority_scope) == (3, 1.0, "order")


def test_with_a_plan_a_quorum_stays_as_it_is() -> None:
    merged = merge(Settings(epochs=1), {"priorities": 4, "bucket_mb": 5, "quorum": 0.8})
    assert (merged.priorities, merged.quorum, merged.priority_scope) == (4, 0.8, "order")


def test_cuts_are_numbers_of_parameters() -> None:
    for text, cuts in ((None, ()), ("equal", ()), ("3", (3,)), ("3,12", (3, 12))):
        settings = {"priorities": 3, "priority_cuts": text}
        assert merge(Settings(epochs=1), settings).cuts == cuts


def test_settings_of_servers_do_nothing_in_the_ring() -> None:
    """So a job's own settings can have them, and `--set system=` chooses."""
    merged = merge(Settings(epochs=1), {"sync_every": 9, "test_every": 2, "quorum": 0.5})
    assert not merged.served and merged.quorum == 0.5


def test_planned_rounds() -> None:
    assert Settings(batch=512, epochs=4).planned_rounds(60000) == 468
    assert Settings(batch=512, epochs=4, rounds=20).planned_rounds(60000) == 20
    assert Settings(batch=512).planned_rounds(60000) is None
    assert Settings(batch=512, epochs=0.5).planned_rounds(100) == 1
    assert Settings(batch=512).rounds_between_tests(60000) == 117
    assert Settings(batch=512, test_every=7).rounds_between_tests(60000) == 7
