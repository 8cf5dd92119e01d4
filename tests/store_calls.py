# SPDX-License-Identifier: Apache-2.0
"""Calls of a group's store."""

from __future__ import annotations

from nicps.session.store_form import Ask, pack


def ask(what: str, *keys: str, values: tuple[bytes, ...] = (), amount: int = 0) -> Ask:
    """One of them."""
    return Ask(0, what, keys, tuple(pack(value) for value in values), amount)
