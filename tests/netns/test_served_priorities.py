# SPDX-License-Identifier: Apache-2.0
"""Jobs with parameter servers and `priorities` (P2, P3): the same weights, another order on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nicps.dataplane import tags
from tests.netns.members import LIGHT, Network, Run, tiny_job
from tests.netns.stage import Stage
from tests.netns.test_partners import ROUNDS, branched, weights
from tests.netns.test_partners import SYSTEM as PARTNERS
from tests.netns.test_servers import SYSTEM, Counters, checked
from tests.netns.test_tags import Listener

#: No host is taken for silent, however busy the machine is, and frames have tags.
TAGGED = ("--silence", "20", "--tags")
CHANNELS = 3
#: 40,800 numbers: 114 fragments of 32 bits, 57 of 16.
WIDE = "\ndef model():\n    return nn.Sequential(nn.Linear(16, 2400))\n"
PRIORITIES = {channel: tags.of_urgency(channel) for channel in range(CHANNELS)}


@pytest.fixture(scope="module")
def three() -> Iterator[Network]:
    with Network(3, program=LIGHT, arguments=TAGGED) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def job(three: Network) -> Path:
    return tiny_job(three.folder, WIDE)


def heard(network: Network, job: Path, **settings: Any) -> tuple[Run, dict[str, Listener]]:
    """A job, and what each host has sent in it."""
    listeners = {host: Listener(network, host) for host in network.names}
    return network.train(job, **settings), listeners


def orders(listener: Listener, kind: str) -> list[list[int]]:
    """Indices of the fragments of one kind in the order in which they leave, of each channel in each step or pull.

    What is sent again does not count.
    """
    found: dict[tuple[int, bytes], list[int]] = {}
    for (name, channel, priority), frame in listener.frames():
        if name in ("PUSH", "PULL", "HELD", "TAKEN", "CONTRIBUTION"):
            assert priority == PRIORITIES[channel], name
        if name == kind:
            # A CONTRIBUTION has its number elsewhere than the others.
            index = int.from_bytes(frame[14 + 40 : 14 + 44], "big")
            at = 14 + (48 if name == "CONTRIBUTION" else 36)
            each = found.setdefault((channel, frame[at : at + 4]), [])
            if index not in each:
                each.append(index)
    listener.close()
    return [found[key] for key in sorted(found)]


def test_synchronous_training_has_the_same_bits(three: Network, job: Path) -> None:
    """T = 1: steps go from the rear to the front, questions from the front to the rear, each with its priority."""
    of = {"rounds": 6, "lane": "i16", "sync_every": 1, "servers": "h1", **SYSTEM}
    plain = checked(three.train(job, **of))
    run, listeners = heard(three, job, priorities=CHANNELS, **of)
    assert checked(run) == plain and len(plain) == 6
    steps = orders(listeners["h2"], "CONTRIBUTION")
    assert len(steps) == 6 * CHANNELS
    assert all(one > later for each in steps for one, later in pairwise(each))
    asked = orders(listeners["h3"], "PULL")
    assert sum(map(len, asked)) >= 7 * 114
    assert all(one < later for each in asked for one, later in pairwise(each))
    given = listeners["h1"].seen()
    for answer in ("HELD", "TAKEN"):
        found = {(channel, priority) for kind, channel, priority in given if kind == answer}
        assert found == {*PRIORITIES.items()}, answer


@pytest.mark.parametrize("lane", ["i32", "i8"])
def test_a_workers_own_pushes_have_the_same_bits(three: Network, job: Path, lane: str) -> None:
    """With one worker, whose steps are pushed one after the other; i32: their answers bring the parameters."""
    of = {
        "rounds": 12,
        "lane": lane,
        "sync_every": 6,
        "test_every": 12,
        "servers": "h1,h2",
        **SYSTEM,
    }
    plain = checked(three.train(job, **of))
    counters = Counters(three)
    run, listeners = heard(three, job, priorities=CHANNELS, **of)
    assert checked(run) == plain and counters.of("pushed")
    steps = orders(listeners["h3"], "PUSH")
    fragments = {"i32": 114, "i8": 29}[lane]
    assert sum(map(len, steps)) == 10 * fragments
    # Of two servers each has its part, side by side.
    half = fragments // 2
    for each in steps:
        parts = [k for k in each if k < half], [k for k in each if k >= half]
        assert all(one > later for part in parts for one, later in pairwise(part))


@pytest.mark.long
def test_with_a_key_and_loss(job: Path) -> None:
    """Channels have numbers of their own: nothing is refused, whatever overtakes."""
    with Stage(3, keyed=True, loss=0.02, arguments=TAGGED, program=LIGHT) as network:
        network.up()
        counters = Counters(network)
        of = {"rounds": 20, "sync_every": 4, "test_every": 10, "lane": "i8", **SYSTEM}
        checked(network.train(tiny_job(network.folder, WIDE), priorities=8, **of))
        assert not counters.of("forged") and not counters.of("replayed")


def test_partners_have_the_same_bits() -> None:
    """B, with PyTorch: half of the parameters come from the partner all the same."""
    with Stage(3, arguments=TAGGED, program=None) as network:
        network.up()
        job = branched(network.folder)
        plain, ordered = (
            network.train(job, lane="i16", **PARTNERS, **more)
            for more in ({}, {"priorities": CHANNELS})
        )
        assert weights(plain) == weights(ordered) and len(weights(plain)) == ROUNDS
        assert ordered.result["partner_bytes"] > 0
        assert (plain.result["channels"], ordered.result["channels"]) == (1, CHANNELS)
