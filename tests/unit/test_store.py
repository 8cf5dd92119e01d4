# SPDX-License-Identifier: Apache-2.0
"""The store that the members of a group share, between hosts that die, come late, and lose frames (`nicps.store`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nicps.errors import NetworkProblem, UsageProblem, WireError
from nicps.session.store_form import MOST_CALL, MOST_VALUE, Answer, Ask, unpack
from nicps.store import Piece, Replica
from nicps.store.replica import MOST_CALLS
from nicps.wire import ScriptStep
from tests.store_calls import ask

STEP_S = 0.001


@dataclass
class Made:
    """A call, and when it was made and answered."""

    host: int
    ask: Ask
    began: float
    ended: float = 0.0
    answer: Answer | None = None

    @property
    def values(self) -> list[bytes]:
        assert self.answer is not None and not self.answer.error, self
        return [unpack(value) for value in self.answer.values]


@dataclass
class Lan:
    """Hosts by number, and frames on their way between them, of which some are lost, doubled and late."""

    seed: int = 0
    loss: float = 0.0
    now: float = 0.0
    view: int = 0
    live: set[int] = field(default_factory=set)
    hosts: dict[int, Replica] = field(default_factory=dict)
    #: Views that hosts are in, as they are late to enter; the frames of another view are not taken.
    entered: dict[int, int] = field(default_factory=dict)
    enters: dict[int, float] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    way: list[tuple[float, int, int, int, Piece]] = field(default_factory=list)
    calls: list[Made] = field(default_factory=list)
    frames: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def form(self, *live: int, at_once: bool = True) -> None:
        """A view with these, of which some may be new."""
        self.view += 1
        self.live = set(live)
        for host in live:
            if host not in self.hosts:
                self.hosts[host] = Replica(self.draw.getrandbits(62))
            self.enters[host] = self.now + (0.0 if at_once else self.draw.random() * 0.05)

    def kill(self, *hosts: int) -> None:
        for host in hosts:
            del self.hosts[host]
            self.entered.pop(host, None)

    def call(self, host: int, asked: Ask) -> Made:
        made = Made(host, asked, self.now)
        self.calls.append(made)
        self.hosts[host].call(len(self.calls) - 1, asked)
        return made

    def step(self) -> None:
        self.now += STEP_S
        arrived = [each for each in self.way if each[0] <= self.now]
        self.way = [each for each in self.way if each[0] > self.now]
        self.draw.shuffle(arrived)
        for host, replica in sorted(self.hosts.items()):
            if host in self.stopped:
                continue
            if host in self.live and self.entered.get(host) != self.view:
                if self.now < self.enters[host]:
                    continue
                self.entered[host] = self.view
                replica.enter(self.now, self.view, host, sorted(self.live))
            for _, to, view, sender, piece in arrived:
                if to == host and view == self.entered.get(host):
                    replica.take(self.now, sender, piece)
            for of, answer in replica.take_answers():
                made = self.calls[of]
                assert made.answer is None and made.host == host
                made.answer, made.ended = answer, self.now
            for piece in replica.due(self.now):
                self._send(host, piece)

    def _send(self, sender: int, piece: Piece) -> None:
        self.frames += 1
        for to in self.hosts:
            if to == sender or self.draw.random() < self.loss:
                continue
            for _ in range(self.draw.choice((1, 1, 1, 2)) if self.loss else 1):
                late = 0.03 if self.loss and self.draw.random() < 0.1 else 0.0
                self.way.append((self.now + late, to, self.entered[sender], sender, piece))

    def until(self, done: Callable[[], bool], most_s: float = 20.0) -> None:
        end = self.now + most_s
        while not done():
            assert self.now < end, "it does not come to an end"
            self.step()

    def answered(self, *calls: Made) -> None:
        self.until(lambda: all(call.answer for call in calls))

    def answer(self, host: int, asked: Ask) -> Answer:
        """Call, and wait for the answer."""
        made = self.call(host, asked)
        self.answered(made)
        assert made.answer is not None
        return made.answer

    def settle(self) -> None:
        """Until nobody has anything to send."""
        self.step()
        self.until(
            lambda: not self.way and all(r.due_at(self.now) is None for r in self.hosts.values())
        )


def of_three(**settings: float) -> Lan:
    lan = Lan(**settings)  # type: ignore[arg-type]
    lan.form(1, 2, 3)
    return lan


# ---- calls


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (ask("set", "k", values=(b"v" * (MOST_VALUE + 1),)), "'k': a value of 262,145 bytes"),
        (ask("set", "k" * 5000, values=(b"v",)), "a key of 5,000 characters"),
        (ask("set", "a", "b", "c", values=(b"v" * MOST_VALUE,) * 3), f"at most {MOST_CALL:,}"),
        (ask("set", "a", "b", values=(b"v",)), "cannot set 2 keys with 1 values"),
        (ask("add", "a", "b", amount=1), "cannot add 2 keys"),
        (ask("swap", "a", values=(b"v",)), "cannot swap 1 keys with 1 values"),
        (Ask(0, "set", ("k",), ("no base64!",)), "not in base64"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: Ask, told: str) -> None:
    lan = of_three()
    with pytest.raises(UsageProblem) as refused:
        lan.call(1, asked)
    assert told in str(refused.value) and "\n" not in str(refused.value)
    assert lan.answer(1, ask("count")).amount == 0


def test_what_one_sets_all_get() -> None:
    lan = of_three()
    lan.answer(1, ask("set", "k", values=(b"v",)))
    for host in (1, 2, 3):
        made = lan.call(host, ask("get", "k"))
        lan.answered(made)
        assert made.values == [b"v"]
    lan.settle()
    frames = lan.frames
    lan.until(lambda: lan.now > 5)
    assert lan.frames == frames  # nothing is sent while nobody calls


def test_a_get_that_waits_holds_nobody_up() -> None:
    lan = of_three()
    waits = [lan.call(host, ask("get", "a", "b")) for host in (1, 2, 3)]
    for host in (1, 2, 3):
        assert lan.answer(host, ask("add", "n", amount=1)).amount == host
    lan.answer(2, ask("set", "a", values=(b"1",)))
    assert not any(made.answer for made in waits)
    lan.answer(3, ask("set", "b", values=(b"2",)))
    lan.answered(*waits)
    assert all(made.values == [b"1", b"2"] for made in waits)


def test_a_call_that_is_forgotten_is_not_answered() -> None:
    lan = of_three()
    waits, goes = lan.call(2, ask("get", "k")), lan.call(2, ask("add", "n", amount=1))
    lan.hosts[2].forget(0)
    lan.hosts[2].forget(1)
    lan.answer(1, ask("set", "k", values=(b"",)))
    lan.settle()
    assert lan.answer(1, ask("add", "n", amount=0)).amount == 1
    assert waits.answer is None and goes.answer is None


def test_a_host_has_so_many_calls_and_no_more() -> None:
    lan = of_three()
    waits = [lan.call(1, ask("get", f"k{k}")) for k in range(MOST_CALLS)]
    with pytest.raises(NetworkProblem, match="wait for the store already"):
        lan.call(1, ask("count"))
    for k in range(MOST_CALLS):
        lan.answer(2, ask("set", f"k{k}", values=(b"",)))
    lan.answered(*waits)
    assert lan.answer(1, ask("count")).amount == MOST_CALLS


def test_a_value_of_many_pieces() -> None:
    lan = of_three(loss=0.1)
    value = random.Random(1).randbytes(MOST_VALUE)
    lan.answer(3, ask("set", "k", values=(value,)))
    made = lan.call(2, ask("get", "k"))
    lan.answered(made)
    assert made.values == [value]


# ---- hosts that go and come


@pytest.mark.parametrize("dies", [1, 2, 3])
def test_any_one_host_may_die(dies: int) -> None:
    """What was answered stays, and what waits goes on."""
    lan = of_three()
    for host in (1, 2, 3):
        lan.answer(host, ask("set", f"of {host}", values=(b"v",)))
        lan.answer(host, ask("add", "n", amount=1))
    rest = sorted({1, 2, 3} - {dies})
    waits = [lan.call(host, ask("get", "late")) for host in rest]
    lan.step()
    lan.kill(dies)
    goes = lan.call(rest[0], ask("add", "n", amount=1))
    for _ in range(300):
        lan.step()
    assert goes.answer is None  # the view has three members, and one of them says nothing
    lan.form(*rest)
    lan.answered(goes)
    assert goes.answer.amount == 4  # type: ignore[union-attr]
    assert lan.answer(rest[1], ask("check", "of 1", "of 2", "of 3")).amount == 1
    lan.answer(rest[1], ask("set", "late", values=(b"x",)))
    lan.answered(*waits)


def test_a_late_host_with_the_lowest_number_gets_the_copy() -> None:
    """It has none, so it is not the one that orders: not even if the others' view changes in between."""
    lan = of_three()
    lan.answer(2, ask("set", "k", values=(b"v" * 30_000,)))
    lan.kill(1)
    lan.form(2, 3)
    lan.answer(3, ask("add", "n", amount=7))
    lan.form(1, 2, 3)
    early = lan.call(1, ask("add", "n", amount=1))
    for _ in range(5):
        lan.step()
    lan.form(1, 2, 3)
    lan.answered(early)
    assert early.answer.amount == 8  # type: ignore[union-attr]
    lan.kill(2, 3)
    lan.form(1)
    made = lan.call(1, ask("get", "k"))
    lan.answered(made)
    assert made.values == [b"v" * 30_000]


def test_what_a_host_waits_for_comes_with_the_copy() -> None:
    lan = of_three()
    waits = lan.call(3, ask("get", "k"))
    lan.answer(3, ask("count"))  # after it
    lan.settle()
    lan.stopped.add(3)
    sets = lan.call(1, ask("set", "k", values=(b"v",)))
    for _ in range(50):
        lan.step()
    lan.form(1, 2, 3)
    lan.stopped.clear()
    lan.answered(sets, waits)
    assert waits.values == [b"v"]


def test_a_host_alone() -> None:
    lan = Lan()
    lan.form(1)
    waits = lan.call(1, ask("get", "k"))
    assert lan.answer(1, ask("add", "n", amount=1)).amount == 1
    lan.answer(1, ask("set", "k", values=(b"v",)))
    assert waits.values == [b"v"] and lan.frames <= 1


def test_a_call_that_most_have_is_not_counted_twice() -> None:
    """The one that orders has carried it out, and dies before anybody is answered."""
    answered = set()
    for steps in range(1, 25):
        lan = of_three()
        lan.settle()
        goes = lan.call(3, ask("add", "n", amount=1))
        for _ in range(steps):
            lan.step()
        answered.add(goes.answer is not None)
        lan.kill(1)
        lan.form(2, 3)
        lan.answered(goes)
        assert goes.answer.amount == 1  # type: ignore[union-attr]
        assert lan.answer(2, ask("add", "n", amount=0)).amount == 1
    assert answered == {False, True}


def test_a_host_that_was_evicted_answers_nothing() -> None:
    """The first one orders, is stopped, and goes on in its view when the others have another one."""
    lan = of_three()
    lan.answer(1, ask("set", "k", values=(b"old",)))
    lan.stopped.add(1)
    lan.form(2, 3)
    lan.answer(2, ask("set", "k", values=(b"new",)))
    lan.stopped.clear()
    stale = lan.call(1, ask("get", "k"))
    for _ in range(500):
        lan.step()
    assert stale.answer is None


def test_a_line_that_nobody_can_mean() -> None:
    """What follows it is not acknowledged: this copy would be another one."""
    for line in (b"[]\n", b"{\n", b'{"op":"do","member":1}\n', b'{"op":"whole"}\n'):
        replica = Replica(1)
        replica.enter(0.0, 1, 2, [1, 2])
        base = b'{"op":"base","base":0}\n'
        with pytest.raises(WireError):
            replica.take(0.0, 1, Piece(ScriptStep.OUTPUT, 1, 0, base + line))
        assert replica.due(0.0) == [] and replica.due_at(0.0) is None


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(40, 120))]
)
def test_drawn_calls_while_hosts_die_and_come(seed: int) -> None:
    """Every answer fits one order of all calls, which is that of the clock where calls did not overlap.

    Counters show it: no two calls of `add` see the same, a later one sees more, and nothing counts twice or is lost.
    """
    draw = random.Random(seed)
    lan = Lan(seed, loss=draw.choice((0.0, 0.05, 0.3)))
    members = set(range(1, draw.randint(2, 5) + 1))
    lan.form(*members)
    for _ in range(draw.randint(3, 8)):
        for _ in range(draw.randint(0, 150)):
            lan.step()
            host = draw.choice(sorted(members))
            if draw.random() < 0.2:
                lan.call(host, ask("add", draw.choice("ab"), amount=1))
            elif draw.random() < 0.1:
                lan.call(host, ask("get", draw.choice("ab")))
        dies = draw.choice(sorted(members))
        rest = members - {dies}
        if draw.random() < 0.5 and any(lan.hosts[k]._base for k in rest if k in lan.hosts):
            lan.kill(dies)
            members.discard(dies)
            for _ in range(draw.randint(0, 40)):
                lan.step()
        elif draw.random() < 0.5:
            members.add(draw.randint(1, 7))
        lan.form(*members, at_once=draw.random() < 0.5)
    same = [made for made in lan.calls if made.ask.what == "add" and _lives(lan, made)]
    lan.until(lambda: all(made.answer for made in same), most_s=60.0)
    lan.settle()
    for key in "ab":
        adds = [m for m in lan.calls if m.ask.keys == (key,) and m.ask.what == "add"]
        done = [m for m in adds if m.answer]
        seen = [m.answer.amount for m in done]  # type: ignore[union-attr]
        assert len(set(seen)) == len(seen)
        for one in done:
            for other in done:
                if one.ended < other.began:
                    assert one.answer.amount < other.answer.amount  # type: ignore[union-attr]
        for got in (m for m in lan.calls if m.ask.keys == (key,) and m.ask.what == "get"):
            if got.answer:
                before = [m.answer.amount for m in done if m.ended < got.began]  # type: ignore[union-attr]
                assert int(got.values[0]) >= max(before, default=1)
        totals = {lan.answer(host, ask("add", key, amount=0)).amount for host in sorted(members)}
        assert len(totals) == 1 and len(done) <= totals.pop() <= len(adds)


def _lives(lan: Lan, made: Made) -> bool:
    """The host that has made the call has not died since."""
    replica = lan.hosts.get(made.host)
    return replica is not None and any(
        lan.calls[call.of] is made for call in (*replica._queue, *replica._waiting)
    )
