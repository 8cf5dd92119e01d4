# SPDX-License-Identifier: Apache-2.0
"""The time that a contribution is on its way."""

from __future__ import annotations

import pytest

from nicps.job.contribution import Contribution

pytestmark = pytest.mark.unit


def test_the_list_is_closed_once_the_first_fragments_go_out() -> None:
    contribution = Contribution()
    contribution.begin(10.0)
    contribution.note_sent(12.0, 12.5)
    contribution.note_sent(13.0, 13.25)
    assert contribution.seconds_listed(15.0) == 2.0
    assert contribution.seconds_waited(15.0) == 4.25
    contribution.begin(20.0)
    assert contribution.seconds_listed(21.0) == 1.0, "nothing has gone out yet"
