# SPDX-License-Identifier: Apache-2.0
"""What a decision says of parameter servers, and what is refused of it (docs/servers.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nicps import wire
from nicps.errors import JobFailed, WireError
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Phase
from nicps.protocol.serving import Serving, per_push, pulled_fragments

SERVING = Serving((1, 4), 64, True, 5)
PHASE = Phase(
    1,
    1,
    wire.PhaseKind.TRAIN,
    first_round=7,
    fragments=100,
    last_fragments=100,
    width=16,
    shares=(0, 4, 4, 0),
    quorum=8,
    exchange=Exchange.SERVERS,
    serving=SERVING,
)


def unpacked(phase: Phase) -> Phase:
    body = wire.Decision(phase.number, phase.generation, phase.kind)
    return Phase.unpack(body, phase.pack(), len(phase.shares))


# ---- the decision


@pytest.mark.parametrize(
    "values",
    [{}, {"every": 0}, {"staleness": False}, {"servers": (4,)}, {"sets": 0}, {"channels": 8}],
)
def test_servers_travel_in_the_decision(values: dict[str, object]) -> None:
    phase = replace(PHASE, serving=replace(SERVING, **values))  # type: ignore[arg-type]
    assert unpacked(phase) == phase


def test_other_exchanges_say_nothing_of_servers() -> None:
    """A decision of theirs is, byte for byte, what it was."""
    plain = replace(PHASE, exchange=Exchange.STRIPES, serving=None)
    assert b"serving" not in plain.pack() and unpacked(plain) == plain


@pytest.mark.parametrize(
    "values",
    [
        {"servers": ()},
        {"servers": (0, 1)},
        {"servers": (1, 1)},
        {"servers": (5,)},
        {"every": -1},
        {"every": 1 << 31},
        {"sets": -1},
        {"sets": 201},
        {"channels": -1},
        {"channels": 9},
    ],
)
def test_servers_that_cannot_be_meant(values: dict[str, object]) -> None:
    phase = replace(PHASE, serving=replace(SERVING, **values))  # type: ignore[arg-type]
    with pytest.raises(WireError, match="does not fit 4 members"):
        unpacked(phase)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b'"every":64', b'"every":"64"'),
        (b'"every":64', b'"every":true'),
        (b'"staleness":true', b'"staleness":1'),
        (b'"servers":[1,4]', b'"servers":[1,"4"]'),
        (b'"servers":[1,4]', b'"servers":7'),
        (b',"sets":5', b""),
        (b'"channels":0', b'"channels":true'),
        (b'"sets":5', b'"sets":5,"more":1'),
        (b'"serving":{', b'"serving":7,"settings":{'),
    ],
)
def test_a_decision_of_the_wrong_form(right: bytes, wrong: bytes) -> None:
    assert right in PHASE.pack()
    body = wire.Decision(1, 1, PHASE.kind)
    with pytest.raises(WireError, match="decision 1 cannot be read"):
        Phase.unpack(body, PHASE.pack().replace(right, wrong), 4)


@pytest.mark.parametrize(
    "values", [{"serving": None}, {"exchange": Exchange.STRIPES}, {"exchange": Exchange.BROADCAST}]
)
def test_servers_go_with_their_exchange(values: dict[str, object]) -> None:
    with pytest.raises(WireError, match="servers go with the exchange of that name"):
        unpacked(replace(PHASE, **values))  # type: ignore[arg-type]


def test_rounds_of_servers_have_one_size() -> None:
    with pytest.raises(WireError, match="sizes of their own"):
        unpacked(replace(PHASE, sized=True))


# ---- who holds what


def test_the_aggregators_are_the_servers_in_the_order_of_their_ranks() -> None:
    """Also one that has a share, and one that is gone: its part is nobody else's in this phase."""
    phase = replace(PHASE, serving=replace(SERVING, servers=(4, 1)), shares=(4, 4, 4, 0))
    assert phase.aggregators({1, 2, 3}) == (4, 1)
    assert phase.among({1, 2, 3}, 2, 0).serving == phase.serving


@given(st.integers(1, 500), st.integers(1, 9))
def test_parts_are_all_of_the_vector_and_of_equal_size(fragments: int, servers: int) -> None:
    serving = Serving(tuple(range(1, servers + 1)), 0)
    parts = [serving.part(rank, fragments) for rank in range(servers)]
    assert [index for part in parts for index in part] == list(range(fragments))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("width", [32, 16, 8])
def test_fragments_of_parameters(width: int) -> None:
    """As many numbers, in lanes of 32 bits."""
    lanes = wire.lanes_per_fragment(width)
    assert per_push(width) * wire.lanes_per_fragment(32) == lanes
    assert pulled_fragments(7, width) * wire.lanes_per_fragment(32) == 7 * lanes


# ---- who asks for it


@pytest.mark.parametrize("name", ["servers", "linux-switch", "ring"])
def test_what_a_job_cannot_name_as_its_exchange(name: str) -> None:
    """A user asks for the system, and not for the way in which its sums are made."""
    said = f"the job's exchange is {name}, and it must be auto, broadcast, stripes or switch"
    with pytest.raises(JobFailed, match=said):
        Plan.choose({"exchange": name}, Exchange.BROADCAST)


@pytest.mark.parametrize(("priorities", "channels"), [(None, 0), (1, 1), (3, 3)])
def test_priorities_are_channels_of_servers_and_no_plan_of_a_step(
    priorities: int | None, channels: int
) -> None:
    settings = {"batch": 8, "system": "S", "priorities": priorities}
    plan = Plan.of("job", settings, Exchange.SERVERS)
    assert (plan.channels, plan.planned, plan.sized) == (channels, False, False)
    assert Plan.of("job", {**settings, "system": "R"}, Exchange.STRIPES).channels == 0
