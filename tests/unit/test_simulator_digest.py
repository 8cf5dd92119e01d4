# SPDX-License-Identifier: Apache-2.0
"""The digest of a simulated job: the same for the same behaviour, another for any other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Committed, SendFragments
from tests.simulator import schedules
from tests.simulator.__main__ import Job, digest, main
from tests.simulator.digest import Digest, digest_of_all
from tests.simulator.drill import job
from tests.simulator.host import Host
from tests.simulator.lan import Lan

pytestmark = pytest.mark.unit

SEED = 6  # eleven hosts and a switch that adds
HALFWAY = 400  # frames


def test_the_same_seed_has_the_same_digest() -> None:
    assert digest(Job(SEED)) == digest(Job(SEED))
    assert digest(Job(SEED))[1] != digest(Job(SEED + 1))[1]


def finished(lan: Lan) -> str:
    assert schedules.finish(lan).what == "done"
    return lan.digest.hexdigest()


def test_one_bit_in_one_frame_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that nobody looks at: the job goes on as before."""
    plain = finished(job()[0])
    before = Lan.broadcast
    flipped = []

    def broadcast(lan: Lan, sender: Host, frame: bytes, key: bytes | None, when: float) -> None:
        if lan.frames == HALFWAY:
            header = wire.unpack(frame).header
            at = wire.Layout.of(wire.Header).offsets[
                wire.Layout.of(wire.Header).names.index("sequence")
            ]
            frame = frame[:at] + bytes([frame[at] ^ 0x80]) + frame[at + 1 :]
            flipped.append(header.sequence ^ wire.unpack(frame).header.sequence)
        before(lan, sender, frame, key, when)

    monkeypatch.setattr(Lan, "broadcast", broadcast)
    changed = finished(job()[0])
    assert flipped == [1 << 31], "one bit, of one frame"
    assert changed != plain


def test_a_frame_that_leaves_later_or_elsewhere_changes_it() -> None:
    frames = {(0, 1.0, b"frame"), (1, 1.0, b"frame"), (0, 1.0 + 1e-9, b"frame"), (0, 1.0, b"franc")}
    found = set()
    for frame in frames:
        digest = Digest()
        digest.add_frame(*frame)
        found.add(digest.hexdigest())
    assert len(found) == len(frames)


def test_what_a_contribution_and_a_commit_say_changes_it() -> None:
    sent = SendFragments(1, 2, 3, 32, ((0, 4), (7, 1)), repair=False)
    others = (
        replace(sent, view=2),
        replace(sent, generation=3),
        replace(sent, round=4),
        replace(sent, samples=31),
        replace(sent, ranges=((0, 4), (7, 2))),
        replace(sent, repair=True),
        replace(sent, exchange=Exchange.SWITCH),
    )
    digests = set()
    for action in (sent, *others):
        digest = Digest()
        digest.add_contribution(0, 1.0, action)
        digests.add(digest.hexdigest())
    assert len(digests) == 1 + len(others)

    lan, _ = job()
    commits: list[Committed] = []
    lan.moments.append(
        lambda host, action: isinstance(action, Committed) and not commits.append(action)
    )
    lan.run(lambda: bool(commits))
    commit = commits[0]
    changed = (
        replace(commit, round=commit.round + 1),
        replace(commit, counted={**commit.counted, 2: 1}),
        replace(commit, unit=commit.unit + 1),
        replace(commit, next_unit=commit.next_unit + 1),
    )
    digests = set()
    for one in (commit, *changed):
        digest = Digest()
        digest.add_commit(0, 1.0, one)
        digests.add(digest.hexdigest())
    assert len(digests) == 1 + len(changed)


def test_one_over_all_seeds_goes_by_their_order() -> None:
    """It does not depend on which process was the first to finish."""
    assert digest_of_all([(1, "aa"), (0, "bb")]) == digest_of_all([(0, "bb"), (1, "aa")])
    assert digest_of_all([(0, "aa"), (1, "bb")]) != digest_of_all([(0, "bb"), (1, "aa")])


def test_the_command_prints_each_and_one_over_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["simulator", "--digest", "--first", "5", "--seeds", "2"])
    assert main() == 0
    *seeds, last = capsys.readouterr().out.splitlines()
    expected = [digest(Job(seed)) for seed in (5, 6)]
    assert [line.split(maxsplit=2) for line in seeds] == [[str(s), d, w] for s, d, w in expected]
    assert last == f"2 seeds: {digest_of_all([(s, d) for s, d, _ in expected])}"
