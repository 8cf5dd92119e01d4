# SPDX-License-Identifier: Apache-2.0
"""The XDP programs of hosts and of a Linux switch round sums by one rule (tests/rounded.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests import rounded
from tests.rounded import CASES, RESTS, ROUND, Case, Rest
from tests.stripes import LANES
from tests.xdp.striped import Target
from tests.xdp.switch_target import SwitchTarget


@pytest.fixture(scope="module")
def host() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


@pytest.fixture(scope="module")
def switch() -> Iterator[SwitchTarget]:
    made = SwitchTarget()
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stripes(host: Target, case: Case) -> None:
    model = rounded.stripes_model(case)
    host.begin(model)
    host.write_own(model)
    outcomes = [host.run(frame) for frame in rounded.stripes_frames(case)]
    lanes = host.blocks["lane"].view(np.int64)[ROUND & 1, : LANES[case.width]]
    rounded.agrees(case, outcomes, lanes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_switch(switch: SwitchTarget, case: Case) -> None:
    model = rounded.switch_model(case)
    switch.begin(model)
    outcomes = [switch.run(frame) for frame in rounded.switch_frames(case)]
    rounded.agrees(case, outcomes, switch.total(model, 0, 0))


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_what_a_switch_adds_of_the_round_before(switch: SwitchTarget, rest: Rest) -> None:
    model = rounded.switch_model(rest.case)
    switch.begin(model)
    rounded.check_rest(rest, switch.run, lambda: switch.total(model, 0, 1))
