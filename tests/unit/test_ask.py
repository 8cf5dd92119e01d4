# SPDX-License-Identifier: Apache-2.0
"""A switch's controller asks what is in force (R4), and every member answers, to that question and seldom."""

from __future__ import annotations

import itertools

from nicps import wire
from nicps.protocol import Node, Send
from nicps.protocol.view import Successor

MAC, CONTROLLER = bytes([2, 0, 0, 0, 0, 1]), bytes([2, 0, 0, 0, 0, 64])
NETWORK = "nicps"


class Nothing:
    """A kernel that nothing has come to."""

    def count(self, round_: int, view: int, sender: int) -> int:
        return 0

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        return []


def question(nonce: int) -> bytes:
    header = wire.Header(network=wire.network_id(NETWORK), view=0, round=0, sender=0, sequence=0)
    body = wire.View(0, nonce, 0, 0, 0, 0, 0, 0, wire.ViewStep.ASK)
    return wire.pack(header, body, [], [])


def asked(node: Node, now: float, nonce: int) -> list[wire.Frame]:
    actions = node.on_frame(now, CONTROLLER, question(nonce))
    return [wire.unpack(action.frame.pack()) for action in actions if isinstance(action, Send)]


def test_a_member_says_what_is_in_force_at_it() -> None:
    numbers = itertools.count(1)
    node = Node(MAC, "h1", NETWORK, Nothing(), lambda: next(numbers))
    assert asked(node, 0.0, 77) == [], "it is in no view"
    node.start(0.0, 5)
    now = 0.0
    while not node.leads:
        now += 0.1
        assert now < 5.0
        node.tick(now)
    (answer,) = asked(node, now, 77)
    assert isinstance(answer.body, wire.View)
    assert answer.body.step == wire.ViewStep.INSTALL and answer.header.view == 0
    assert (answer.body.nonce, answer.body.addressee) == (77, 0)
    assert answer.body.number == node.view.number
    successor = Successor.of(answer)
    assert successor is not None and successor.seed == node.view.seed
    assert successor.live == node.view.live


def test_a_question_that_is_sent_again_and_again_gets_few_answers() -> None:
    numbers = itertools.count(1)
    node = Node(MAC, "h1", NETWORK, Nothing(), lambda: next(numbers))
    node.start(0.0, 5)
    while not node.leads:
        node.tick(1.0)
    first = sum(len(asked(node, 10.0 + i / 1000, 77)) for i in range(100))
    later = sum(len(asked(node, 11.0 + i / 100, 77)) for i in range(1000))
    assert first == 8 and 100 <= later <= 8 + 100
