# SPDX-License-Identifier: Apache-2.0
"""The time that a contribution is on its way."""

from __future__ import annotations

import pytest

from nicps.job.contribution import Contribution

pytestmark = pytest.mark.unit


def test_the_list_is_closed_once_the_first_fragments_go_out() -> None:
    contribution = Contribution()
    contribution.begin(10.0, 4)
    contribution.note_sent(4, 12.0, 12.5)
    contribution.note_sent(4, 13.0, 13.25)
    assert contribution.seconds_listed(15.0, 4) == 2.0
    assert contribution.seconds_waited(15.0, 4) == 4.25
    contribution.begin(20.0, 6)
    assert contribution.seconds_listed(21.0, 6) == 1.0, "nothing has gone out yet"


def test_a_contribution_that_is_ready_ahead_does_not_change_the_one_on_its_way() -> None:
    contribution = Contribution()
    contribution.begin(10.0, 4)
    contribution.begin(11.0, 5)
    contribution.note_sent(4, 12.0, 12.5)
    assert contribution.seconds_listed(15.0, 4) == 2.0
    assert contribution.seconds_waited(15.0, 4) == 4.5
    contribution.note_sent(5, 16.0, 16.5)
    assert contribution.offered_at(5) == 11.0 and contribution.seconds_listed(17.0, 5) == 5.0
