# SPDX-License-Identifier: Apache-2.0
"""Parts of a whole as percentages for people, which are 100 together as they are written."""

from __future__ import annotations

from collections.abc import Sequence


def percents(parts: Sequence[float], digits: int = 0) -> list[str]:
    """The part of each in the sum of all, with so many decimals, by the method of largest remainders.

    Args:
        parts: 0 or more each; if all are 0, so are the percentages.
    """
    whole, unit = sum(parts), 10**digits
    if whole <= 0:
        return [f"{0:.{digits}f}%" for _ in parts]
    exact = [100 * unit * part / whole for part in parts]
    units = [int(each) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda at: units[at] - exact[at])
    for at in by_rest[: 100 * unit - sum(units)]:
        units[at] += 1
    return [f"{each / unit:.{digits}f}%" for each in units]
