# SPDX-License-Identifier: Apache-2.0
"""Strategies of Hypothesis that are made once: to make one takes longer than to draw from it a hundred times."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st


@functools.lru_cache(maxsize=None, typed=True)
def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of these values; what comes more than once is more likely."""
    return st.sampled_from(values)


@functools.cache
def between(least: int, most: int) -> st.SearchStrategy[int]:
    """A whole number, both ends included."""
    return st.integers(least, most)
