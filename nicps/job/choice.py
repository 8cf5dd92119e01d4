# SPDX-License-Identifier: Apache-2.0
"""The choice of a job's next exchange for training, at its lead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nicps import wire
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.actions import Log
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Order, Orders, PublishEvent
from nicps.job.plan import Found, Plan
from nicps.job.serving import replace_servers
from nicps.protocol import Phase
from nicps.protocol.serving import Serving

#: Boots of a switch that are given up, each after seconds without sums, before no further one is tried.
_MOST_BOOTS = 4


@dataclass(frozen=True, slots=True)
class Wait:
    """Training is to begin, and a Linux switch that is heard is not ready yet.

    `number`: the serial number of this wait; `joined`: members that train from now on.
    """

    number: int
    joined: frozenset[int]


class Choice:
    """A Linux switch if one is ready, or the plan's exchange without one.

    An exchange that has made no sums is given up for the rest of the job, a Linux switch until it was started again. If
    a member leaves before another exchange has made a sum, it may have been the reason: those that were given up since
    the last sum are tried again, after a round.

    Args:
        found: how far the job is, where another host has led before.

    Attributes: `exchange`, the one without a Linux switch; `wait`, for a switch that is there; `read`, the last round
    that all workers have read, if there are parameter servers; `reads`, the last one that each worker had read when a
    server was lost, until that server is replaced; `channels`, the plan of a step, where steps have one: that of the
    phase before, or the training program's; `chosen`, the last choice and its reason, as the event `training` has them.
    """

    def __init__(self, plan: Plan, node: NodeInfo, found: Found | None = None) -> None:
        self.exchange = plan.exchange
        self.wait: Wait | None = None
        self.read = 0
        self.reads: Mapping[int, int] = {}
        self.chosen: Mapping[str, str] = {}
        self.channels = found.channels if found is not None else ()
        self._plan, self._node = plan, node
        self._failed = set(found.failed) if found is not None else set()
        self._servers = found.servers if found is not None else ()  # of the last phase, by rank
        self._waits = 0
        self._waited_in = 0  # the view in which the switch has been waited for
        self._said = ""
        self._failed_boot = 0  # of the switch, as it was given up here for making no sums
        self._boots = 0  # that were given up
        self._doubted: set[Exchange] = set()  # given up since the last sum
        self._among: frozenset[int] = frozenset()  # the live members when the first of these was
        self._anew = found is not None and found.anew  # others are tried again after this round
        self._pardons = self._anew  # that a switch was given up before this says nothing any more
        self._returns = 0  # how often some were
        self._unsaid: Orders = []  # of that, with the next choice
        self._lonely = False  # the last phase has one worker, which has no partner
        self._instead: Exchange | None = (
            None  # of an exchange that has failed, as the user was told
        )
        self._shown: Exchange | None = None  # the one that the user knows of

    # ---- the next phase

    def make(
        self, fragments: int, joined: frozenset[int], *, waits: bool = True
    ) -> Exchange | None:
        """The exchange of the next training phase; None: wait for the switch first.

        Args:
            fragments: the size of its vectors.
            joined: members that train from now on.
            waits: it may wait: no round is open that may be committed meanwhile.
        """
        view, switch, self.wait = self._node.view, self._node.switch, None
        tries = self._tries_switch
        ready = tries and not switch.find_lack(fragments, self._plan.width)
        comes = tries and switch.heard and len(view.live) > 1
        if waits and comes and not ready and view.number != self._waited_in:
            self._waited_in = view.number
            self._waits += 1
            self.wait = Wait(self._waits, joined)
            return None
        self._anew = False
        return Exchange.LINUX_SWITCH if ready else self.exchange.among(len(view.live))

    def explain(self, exchange: Exchange, fragments: int) -> Orders:
        """The choice and its reason: logged once, and again if the exchange or the reason changes.

        The user has the first one with the event that training begins, and is told if a switch takes over later.
        """
        why, warns = self._reason(exchange, fragments)
        warns |= exchange.central and self._shown not in (None, exchange)
        self._shown = exchange
        self.chosen = {"exchange": exchange.name, "exchange_reason": why}
        text = f"exchange {exchange.name}: {why}"
        told, self._unsaid = self._unsaid, []
        if text == self._said:
            return told
        self._said, known = text, exchange is self._instead
        if known:  # with the reason, as the one before failed
            self._instead = None
            return told
        return [*told, PublishEvent("warning", {"message": text}) if warns else Log(text)]

    def _reason(self, exchange: Exchange, fragments: int) -> tuple[str, bool]:
        """Why it is this exchange, and whether the user has asked for another one."""
        plan = self._plan
        if exchange.central:
            return "the switch adds", False
        if self._tries_switch and not exchange.needs_trust:
            lack = self._node.switch.find_lack(fragments, plan.width)
            text = lack or "it has been chosen without the switch"
            return text, bool(lack) and plan.names_switch
        if exchange is not plan.exchange:
            alone = len(self._node.view.live) == 1
            return (
                "one host trains alone" if alone else f"{plan.exchange.name} has been given up",
                False,
            )
        return "the Linux switch has been given up" if self.switch_failed else plan.why, False

    def choose_servers(
        self, counted: Collection[int], fragments: int
    ) -> tuple[Serving | None, Orders]:
        """Which members serve parameters in the next training phase, and what is said of that; None: none does.

        Args:
            counted: the members that have the job's state.
            fragments: of steps in the vector.

        Raises:
            JobFailed: there are too few members for servers and workers, or too many servers for the model.
        """
        plan, view = self._plan, self._node.view
        if plan.servers is None:
            return None, []
        before, told = self._servers, list[Order]()
        servers = before or plan.servers.choose(view)
        if len(servers) > fragments:
            raise JobFailed(
                f"{len(servers)} servers are too many for a model of {fragments} fragments: name {fragments} or fewer"
            )
        if not plan.servers.train and not set(counted).difference(servers):
            raise JobFailed("all hosts that trained have left")
        if gone := [number for number in servers if number not in counted]:
            reads, self.reads = self.reads, {}  # they say nothing about the next loss
            servers = replace_servers(servers, counted, view, reads, train=plan.servers.train)
            new = view.names(set(servers) - set(before)) or "nobody"
            text = f"{view.names(gone)} served parameters, and left: {new} serves in its place"
            lost = "what was pushed since the last synchronisation is lost there"
            told.append(PublishEvent("warning", {"message": f"{text}; {lost}"}))
        lonely = bool(plan.sets) and len(set(counted).difference(servers)) == 1
        if lonely and not self._lonely:
            text = "system=B: one worker trains, which has no partner: the servers send it all parameters"
            told.append(PublishEvent("warning", {"message": text}))
        self._servers, self._lonely = servers, lonely
        return Serving(servers, plan.every, plan.staleness, plan.sets, plan.channels), told

    def is_read(self, round_: int, phase: Phase) -> bool:
        """With servers: all workers have read that round, and each server can pull what the others serve."""
        if phase.serving is None:
            return True
        live = self._node.view.live
        left = live.intersection(phase.serving.servers)
        lacks = len(left) < len(phase.serving.servers) and left.difference(phase.sharing(live))
        return self.read >= round_ and not lacks

    def improves(self, phase: Phase, fragments: int) -> bool:
        """Whether another exchange could take over: one that is tried again, or a switch that has become ready, also
        one that was given up, once it has been started again. A program of all-reduces expects no new phase for that.

        While a phase waits for a switch it does: no round is committed that may be open when the wait ends.
        """
        if self.wait is not None:
            return True
        if phase.exchange.central or not self._plan.feedback:
            return False
        if self._anew and phase.exchange is not self.exchange.among(len(self._node.view.live)):
            return True
        if not self._plan.tries_switch:
            return False
        if self._node.switch.find_lack(fragments, self._plan.width):
            return False
        if self._failed_boot < self._node.switch.boot and 0 < self._boots < _MOST_BOOTS:
            self._failed.discard(Exchange.LINUX_SWITCH)
        return self._tries_switch

    @property
    def _tries_switch(self) -> bool:
        return self._plan.tries_switch and Exchange.LINUX_SWITCH not in self._failed

    # ---- exchanges that fail

    @property
    def switch_failed(self) -> bool:
        """The Linux switch was tried and is not used any more, whichever host leads the job."""
        return self._plan.tries_switch and Exchange.LINUX_SWITCH in self._failed

    def keeps_failed(self, known: bool) -> bool:
        """The same, also as decisions before have said so (`known`), unless what they gave up is tried again."""
        return self.switch_failed or (known and not self._pardons)

    def has_failed(self, exchange: Exchange) -> bool:
        """Whether it has been given up."""
        return exchange in self._failed

    def refuse_stripes(self, reason: str) -> Orders:
        """A member's kernel takes no frames of stripes, and so none of a Linux switch: every host adds for itself."""
        self._failed |= {Exchange.STRIPES, Exchange.LINUX_SWITCH}
        self._doubted.clear()
        self._boots = _MOST_BOOTS
        self.exchange = self._instead = Exchange.BROADCAST
        text = f"{reason}: every host adds for itself from now on (exchange {self.exchange.name})"
        return [PublishEvent("warning", {"message": text})]

    @property
    def doubted(self) -> bool:
        """Some were given up, and there has been no sum since."""
        return bool(self._doubted)

    def note_sum(self) -> None:
        """A training round was committed: those that were given up before stay so, unless a member has left before."""
        self._unsaid += self._try_again("another exchange", "")
        self._doubted.clear()

    def reconsider(self, phase: Phase) -> Orders:
        """A view is in force. Try the exchanges again that may have failed because of a member that is gone."""
        unused = phase.kind is wire.PhaseKind.TRAIN and self._node.open_round == phase.first_round
        return self._try_again(phase.exchange.name, " after this round") if unused else []

    def _try_again(self, sooner: str, when: str) -> Orders:
        """Those that were given up since the last sum, if a member has left since the first of them was.

        Args:
            sooner: what has made no sum before it left; `when` they are tried: both for people.
        """
        view = self._node.view
        gone = self._among - view.live
        if not (self._doubted and gone) or self._returns == _MOST_BOOTS:
            return []
        again = ", ".join(sorted(exchange.name for exchange in self._doubted))
        self._pardons |= Exchange.LINUX_SWITCH in self._doubted
        self._failed -= self._doubted
        self._doubted.clear()
        self._returns += 1
        self.exchange, self._instead, self._anew = self._allowed(self._plan.exchange), None, True
        text = f"{view.names(gone)} left before {sooner} has made a sum: tried again{when}: {again}"
        return [PublishEvent("warning", {"message": text})]

    def give_up(self, exchange: Exchange) -> Orders:
        """The exchange makes no sums: replace it by one that has not been given up before."""
        if not self._doubted:
            self._among = self._node.view.live
        self._failed.add(exchange)
        self._doubted.add(exchange)
        if exchange is Exchange.LINUX_SWITCH:
            self._failed_boot = self._node.switch.granted_boot
            self._boots += 1
        if exchange.fallback is None:
            return []
        self.exchange = self._instead = after = self._allowed(exchange.fallback)
        known = "" if after is exchange.fallback else f"; that has failed before: {after.name}"
        return [PublishEvent("warning", {"message": exchange.fails + known})]

    def _allowed(self, exchange: Exchange) -> Exchange:
        """That one, or the first after it that has not been given up."""
        while exchange in self._failed and exchange.fallback is not None:
            exchange = exchange.fallback
        return exchange
