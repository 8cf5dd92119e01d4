# SPDX-License-Identifier: Apache-2.0
"""Messages of one connection for several threads."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from nicps.exchange import Exchange
from nicps.session import shared_form as says
from nicps.session.channel import ChannelClosed
from nicps.session.mailbox import Mailbox, Received


class Line:
    """A connection: messages come as they are put."""

    def __init__(self) -> None:
        self.there: deque[Received] = deque()
        self.noted: list[says.FromAgent] = []
        self.on_note: Callable[[], object] = lambda: None
        self.lost = False
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self.mail = Mailbox(self.bell, lambda: bool(self.there), self._receive, self._note)
        self.mail.begin(planned=True)

    def put(self, message: says.FromAgent) -> None:
        os.eventfd_write(self.bell, 1)  # first: a reader that sees the message reads this, too
        self.there.append((message, []))

    def _receive(self) -> Received:
        os.eventfd_read(self.bell)
        if self.lost:
            raise ChannelClosed("the agent has gone")
        return self.there.popleft()

    def _note(self, message: says.FromAgent, fds: list[int]) -> None:
        self.on_note()
        self.noted.append(message)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.mail.close()
    os.close(made.bell)


def commit(channel: int, round_: int) -> says.Committed:
    return says.Committed(round_, {}, 0, 0, Exchange.STRIPES, 0.0, channel=channel)


VIEW = says.View(2, (1, 2), 1, 3)
LATER = says.View(3, (1,), 1, 3)
AGAIN = says.Phase("train", 9, 3, 0, (), Exchange.STRIPES, 1, (), 1)
END = says.Phase("test", 9, 4, 0, (), Exchange.BROADCAST, 1, (), 1)


def waiting(line: Line, *rounds: tuple[int, int]) -> dict[tuple[int, int], threading.Thread]:
    """A thread for each, which waits for that commit."""
    found: dict[tuple[int, int], object] = {}
    line.found = found  # type: ignore[attr-defined]

    def wait(of: tuple[int, int]) -> None:
        found[of] = line.mail.take_commit(*of)
        line.mail.wake()

    threads = {of: threading.Thread(target=wait, args=(of,), daemon=True) for of in rounds}
    for thread in threads.values():
        thread.start()
    return threads


def test_a_thread_is_woken_for_what_it_may_do_instead(line: Line) -> None:
    """It waits for the commit again afterwards."""
    there, again = threading.Event(), threading.Event()
    found: list[says.Committed | None] = []

    def wait() -> None:
        found.append(line.mail.take_commit(0, 3, unless=there.is_set))
        again.set()
        found.append(line.mail.take_commit(0, 3))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    there.set()
    line.mail.wake()
    assert again.wait(20.0)
    line.put(commit(0, 3))
    thread.join(20.0)
    assert found == [None, commit(0, 3)]


def test_each_thread_gets_what_names_its_round(line: Line) -> None:
    threads = waiting(line, (0, 3), (1, 3), (1, 4))
    commits = [commit(1, 3), commit(1, 4), commit(0, 3)]
    for each in commits:
        line.put(each)
    for thread in threads.values():
        thread.join(10)
    assert line.found == {(each.channel, each.round): each for each in commits}  # type: ignore[attr-defined]


def test_the_end_of_the_phase_ends_all_waiting_but_what_came_before_counts(line: Line) -> None:
    line.put(commit(0, 3))
    line.put(END)
    threads = waiting(line, (1, 3))
    threads[1, 3].join(10)
    assert line.found == {(1, 3): None}  # type: ignore[attr-defined]
    assert line.mail.take_commit(0, 3) == commit(0, 3)
    assert line.mail.take() == (END, [])


def test_the_thread_that_computes_is_woken_as_it_reads(line: Line) -> None:
    """No message comes: another thread has done what it waits for."""
    done = threading.Event()
    threading.Timer(0.05, lambda: (done.set(), line.mail.wake())).start()
    line.mail.attend(done.is_set)


def test_it_hears_what_is_for_it_while_it_waits(line: Line) -> None:
    done = threading.Event()
    line.put(says.Keep())
    threading.Timer(0.05, lambda: (done.set(), line.mail.wake())).start()
    line.mail.attend(done.is_set)
    assert line.noted == [says.Keep()]


def test_a_view_is_noted_at_once_but_not_before_a_phase(line: Line) -> None:
    line.put(VIEW)
    line.mail.poll()
    assert line.noted == [VIEW] and not line.mail.rest
    line.put(END)
    line.put(VIEW)
    line.mail.poll()
    assert line.noted == [VIEW] and [m for m, _ in line.mail.rest] == [END, VIEW]


def test_a_view_does_not_wait_behind_what_is_no_phase(line: Line) -> None:
    line.put(says.Keep())
    line.put(VIEW)
    line.mail.poll()
    assert line.noted == [VIEW] and line.mail.take() == (says.Keep(), [])


def test_what_comes_behind_a_phase_is_of_that_phase(line: Line) -> None:
    """A quorum may have closed the round's list before this program was in the phase."""
    for message in (AGAIN, VIEW, commit(1, 9), END, LATER):
        line.put(message)
    line.mail.poll()
    assert line.mail.take_commit(1, 9) is None, "it is not of the phase that ends"
    assert line.mail.take() == (AGAIN, []) and line.noted == []
    line.mail.begin(planned=True)
    assert line.noted == [VIEW], "LATER is of the next phase"
    assert line.mail.take_commit(1, 9) == commit(1, 9)
    assert [m for m, _ in line.mail.rest] == [END, LATER]


def test_a_view_does_not_overtake_another_one(line: Line) -> None:
    for message in (AGAIN, VIEW):
        line.put(message)
    line.mail.poll()
    assert line.mail.take() == (AGAIN, [])
    line.put(LATER)
    line.mail.poll()
    assert line.noted == [] and [m for m, _ in line.mail.rest] == [VIEW, LATER]


def test_commits_behind_a_test_are_kept_for_it(line: Line) -> None:
    line.put(END)
    line.put(commit(0, 9))
    line.mail.poll()
    assert line.mail.take() == (END, [])
    line.mail.begin(planned=False)
    assert line.mail.take(time.monotonic()) == (commit(0, 9), [])


def test_what_is_behind_a_view_is_taken_once_it_is_noted(line: Line) -> None:
    """Buckets are exchanged in a thread, while the thread that computes notes what is urgent."""
    line.mail.begin(planned=False)
    line.put(VIEW)
    line.put(commit(0, 9))
    line.mail.poll()
    noted_before: list[list[says.FromAgent]] = []

    def take() -> None:
        assert line.mail.take() == (commit(0, 9), [])
        noted_before.append([*line.noted])

    thread = threading.Thread(target=take, daemon=True)
    line.on_note = lambda: (thread.start(), thread.join(0.1))
    line.mail.note_first(says.View)
    thread.join(10)
    assert noted_before == [[VIEW]]


def test_commits_of_a_test_are_the_computing_thread_s(line: Line) -> None:
    line.mail.begin(planned=False)
    line.put(commit(0, 9))
    assert line.mail.take() == (commit(0, 9), [])


def test_a_lost_connection_is_every_thread_s(line: Line) -> None:
    line.lost = True
    line.put(VIEW)
    with pytest.raises(ChannelClosed):
        line.mail.take()
    with pytest.raises(ChannelClosed):
        line.mail.take_commit(0, 1)


def test_a_thread_that_wakes_the_others_after_the_end_writes_nowhere() -> None:
    """A file that is opened then has the descriptor of the bell."""
    mail = Mailbox(0, lambda: False, lambda: (VIEW, []), lambda *_: None)
    mail.close()
    files = [os.pipe2(os.O_NONBLOCK) for _ in range(4)]
    mail.wake()
    for reads, writes in files:
        with pytest.raises(BlockingIOError):
            os.read(reads, 8)
        os.close(reads)
        os.close(writes)
