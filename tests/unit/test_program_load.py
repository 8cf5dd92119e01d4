# SPDX-License-Identifier: Apache-2.0
"""Loading a BPF program while signals come: the verifier gives up with EAGAIN, and is asked again."""

from __future__ import annotations

import errno
import os

import pytest

from nicps.dataplane import bpf

pytestmark = pytest.mark.unit


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What bpf(2) answers, one after the other: a descriptor, or an error below 0."""
    given: list[int] = []

    def answer(command: int, what: str, attr: object) -> int:
        assert command == bpf.PROG_LOAD
        if (code := given.pop(0)) < 0:
            raise OSError(-code, os.strerror(-code))
        return code

    monkeypatch.setattr(bpf, "_bpf", answer)
    return given


def load() -> int:
    return bpf.program_load(bpf.PROGRAM_TYPES["xdp"], bytes(16), 0, "pass")


def test_a_signal_is_no_refusal(answers: list[int]) -> None:
    answers += [-errno.EAGAIN, -errno.EAGAIN, 7]
    assert load() == 7 and not answers


def test_a_refusal_is_one_at_once(answers: list[int]) -> None:
    answers += [-errno.EACCES, 7]
    with pytest.raises(PermissionError):
        load()
    assert answers == [7]


def test_signals_without_end(answers: list[int]) -> None:
    answers += [-errno.EAGAIN] * 20
    with pytest.raises(BlockingIOError):
        load()
    assert len(answers) == 10
