# SPDX-License-Identifier: Apache-2.0
"""What can go wrong: faults that a schedule lets happen at a time, or at a moment of the protocol. Each ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from nicps import wire
from nicps.job.lead import CANCEL_S
from nicps.protocol import Action, Committed, Installed, NodeState, Prepare, Send, SendFragments
from tests.simulator.host import Host
from tests.simulator.lan import STALL_S, Lan, kind_sent

LASTS_S = (0.05, 0.5, 3.0, 3.0)  # shorter than a time-out, longer, and long
_PROPOSE, _ACCEPT, _INSTALL = (100 + step for step in wire.ViewStep if step != wire.ViewStep.ASK)

Moment = Callable[[Host, Action], bool]


def _sends(kind: int) -> Moment:
    return lambda host, action: isinstance(action, Send) and kind_sent(action.frame) == kind


def _prepares(kind: wire.PhaseKind, purpose: str = "") -> Moment:
    return lambda host, action: (
        isinstance(action, Prepare)
        and action.phase.kind is kind
        and (not purpose or action.phase.settings["purpose"] == purpose)
    )


def _closing(host: Host, action: Action) -> bool:
    ring = host.node.ring
    return (
        isinstance(action, Send)
        and isinstance(action.frame.body, wire.Token)
        and ring is not None
        and ring.token is not None
        and ring.token.state == wire.TokenState.CLOSING
    )


#: Where a fault can strike on purpose: in each phase, and around each step of a view's change.
MOMENTS: dict[str, Moment] = {
    "forming": _sends(wire.FrameType.CALL),
    "installed": lambda host, action: isinstance(action, Installed),
    "hand-out": _prepares(wire.PhaseKind.HANDOUT, "job"),
    "files": _prepares(wire.PhaseKind.HANDOUT, "files"),
    "state": _prepares(wire.PhaseKind.HANDOUT, "state"),
    "deciding": _sends(wire.FrameType.DECISION),
    "training": _prepares(wire.PhaseKind.TRAIN),
    "broadcast": lambda host, action: isinstance(action, SendFragments),
    "closing": _closing,
    "committed": lambda host, action: isinstance(action, Committed),
    "test": _prepares(wire.PhaseKind.TEST),
    "finish": _prepares(wire.PhaseKind.FINISH),
    "collecting": _prepares(wire.PhaseKind.HANDOUT, "collect"),
    "stop": _prepares(wire.PhaseKind.STOP),
    "proposal": _sends(_PROPOSE),
    "accepting": _sends(_ACCEPT),
    "installing": _sends(_INSTALL),
    "voting": _sends(wire.FrameType.VOTE),
}
#: Kinds of frames of which the next few are lost everywhere.
LOST = (
    *(_PROPOSE, _ACCEPT, _INSTALL),
    *(wire.FrameType.VOTE, wire.FrameType.TOKEN, wire.FrameType.LEAVE, wire.FrameType.WANT),
    *(wire.FrameType.DECISION, wire.FrameType.ACK, wire.FrameType.CALL, wire.FrameType.ANSWER),
)
#: The same, where the exchange is stripes.
STRIPED = (
    *(wire.FrameType.CONTRIBUTION, wire.FrameType.SUM),
    *(wire.FrameType.ASK, wire.FrameType.LACKING),
)


@dataclass(frozen=True)
class Faults:
    """What can be done to a LAN; how long it lasts comes from `random`."""

    lan: Lan
    random: Random

    def _for_a_while(self, end: Callable[[], None]) -> None:
        until = self.lan.now + self.random.random() * self.random.choice(LASTS_S)
        self.lan.trouble(until)
        self.lan.at(until, end)

    def kill(self, host: Host) -> None:
        """kill -9 of agent and program; `nicps join` again later."""
        if not host.dead:
            host.kill()
            self._for_a_while(lambda: host.restart() if host.dead else None)

    def pause(self, host: Host) -> None:
        """SIGSTOP, and SIGCONT."""
        if host.dead or host.paused:
            return
        host.pause()
        life = host.life
        self._for_a_while(lambda: host.resume() if host.paused and host.life == life else None)

    def kill_program(self, host: Host) -> None:
        """kill -9 of the training program alone."""
        if not host.dead and not host.paused and host.process is not None:
            host.kill_program()

    def hang(self, host: Host) -> None:
        """SIGSTOP of the training program alone."""
        if not host.dead and not host.paused and host.process is not None:
            host.hang()
            self.lan.trouble(self.lan.now + STALL_S)

    def leave(self, host: Host) -> None:
        """`nicps leave`, and `nicps join` again later."""
        if not host.dead and not host.paused and host.process is not None:
            host.leave()
            self._for_a_while(lambda: host.restart() if host.dead else None)

    def cancel(self, host: Host) -> None:
        """No fault: its user ends the job. The model is saved first, which is waited for."""
        if not host.dead and not host.paused:
            host.cancel()
            self.lan.trouble(self.lan.now + CANCEL_S)

    def sicken(self, host: Host) -> None:
        """The same, and no training program runs there any more; or the whole host comes back like that."""
        if host.dead or host.paused or host.process is None:
            return  # where the job's first one does not run, it ends for all
        host.sick = True
        if self.random.random() < 0.5:
            self.kill_program(host)
        else:
            self.kill(host)

    def break_program(self, host: Host) -> None:
        """It ends with an error."""
        if not host.dead and not host.paused and host.process is not None:
            host.break_program()

    def renew(self, host: Host) -> None:
        """No fault: the view's key has served its time."""
        if member(host):
            host.renew()

    def tamper(self, host: Host) -> None:
        """Other weights in the training program's memory, at one host of a job."""
        if not host.dead and not self.lan.checks.tampered:
            host.tamper()

    def isolate(self, host: Host) -> None:
        """Its link goes down, and up again."""
        alone = frozenset({host.index})
        self._cut([alone, frozenset(range(len(self.lan.hosts))) - alone])

    def cut(self, parts: int = 2) -> None:
        """The LAN falls apart, and is healed."""
        indices = list(range(len(self.lan.hosts)))
        self.random.shuffle(indices)
        places = sorted(self.random.sample(range(1, len(indices)), min(parts, len(indices)) - 1))
        bounds = zip([0, *places], [*places, len(indices)], strict=True)
        self._cut([frozenset(indices[a:b]) for a, b in bounds])

    def _cut(self, groups: list[frozenset[int]]) -> None:
        self.lan.cut(groups)
        self._for_a_while(lambda: self.lan.cut([]) if self.lan.groups == groups else None)

    def lose(self) -> None:
        """The next few frames of one kind reach nobody."""
        kind = self.random.choice(LOST)
        self.lan.lose[kind] = self.lan.lose.get(kind, 0) + self.random.randint(1, 4)

    def again(self, time: float, rng: Random) -> None:
        """A stranger sends a frame that it has overheard once more."""
        lan = self.lan

        def send() -> None:
            if lan.overheard:
                lan.replay(*rng.choice(lan.overheard))

        lan.trouble(time)
        lan.at(time, send)

    def of_switch(self, time: float, kind: str, rng: Random) -> None:
        """A switch that adds "forget"s all it knows, or "stop"s adding, perhaps for good; a host is "deaf" to it."""
        switch = self.lan.switch

        def strike() -> None:
            self.lan.note(f"SWITCH {kind}")
            if kind == "forget":
                switch.forget()
            elif kind == "deaf":
                self.lan.deaf = rng.choice(self.lan.hosts)
                back = self.lan.now + rng.random()
                self.lan.trouble(back)
                self.lan.at(back, lambda: setattr(self.lan, "deaf", None))
            else:
                switch.adds = False
                if rng.random() < 0.5:
                    back = self.lan.now + rng.random()
                    self.lan.trouble(back)
                    self.lan.at(back, lambda: setattr(switch, "adds", True))

        self.lan.trouble(time)
        self.lan.at(time, strike)

    def of_stripes(self, after: float) -> None:
        """Frames of a kind are lost in a row, or on one way; a switch forgets its hosts; gradients are left out."""
        lan, rng = self.lan, self.lan.odds.random
        lan.plan = replace(lan.plan, width=rng.choice((8, 16)))
        lan.fragments = rng.choice((lan.fragments, lan.fragments, 1, 40))
        lan.too_large = rng.choice((0.0, 0.02, 0.5))
        for _ in range(rng.choice((0, 0, 1, 3))):
            kind, count = rng.choice(STRIPED), rng.randint(1, 40)

            def lose(kind: int = kind, count: int = count) -> None:
                lan.lose[kind] = lan.lose.get(kind, 0) + count

            lan.at(after + rng.random(), lose)
        if rng.random() < 0.15:
            self._starve(after + rng.random(), rng)
        if rng.random() < 0.3:
            start = after + rng.random()
            lan.trouble(start + 0.1)
            lan.at(start, lambda: setattr(lan.odds, "forgetful", True))
            lan.at(start + 0.1, lambda: setattr(lan.odds, "forgetful", False))

    def of_linux_switch(self, after: float) -> None:
        """A Linux switch is killed, for a while or for good, has too little memory, is not heard, or hears nothing."""
        lan, rng = self.lan, self.lan.odds.switch
        switch = lan.linux
        if rng.random() < 0.1:
            switch.memory = rng.choice((0, 3))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            start = after + rng.random() * rng.choice((0.3, 1.0, 3.0))
            lan.trouble(start)
            kind = rng.choice(("restart", "restart", "kill", "lose", "lose", "grants", "starve"))
            if kind in ("restart", "kill"):
                lan.at(start, switch.kill)
                if kind == "restart" or rng.random() < 0.5:
                    back = start + rng.choice((0.001, 0.05, 0.5, 2.0, 4.0)) * rng.random()
                    lan.trouble(back)
                    lan.at(back, switch.start)
            elif kind == "lose":
                step, count = (
                    rng.choice((wire.SwitchStep.HELLO, wire.SwitchStep.READY)),
                    rng.randint(1, 5),
                )
                lan.at(start, lambda step=step, count=count: switch.lose.update({int(step): count}))
            elif kind == "grants":
                count, grant = rng.randint(1, 8), int(wire.FrameType.SWITCH)
                lan.at(start, lambda grant=grant, count=count: lan.lose.update({grant: count}))
            else:
                host = rng.randrange(len(lan.hosts))
                pair = (host, -1) if rng.random() < 0.5 else (-1, host)
                until = start + rng.choice(LASTS_S)
                lan.trouble(until)
                lan.at(start, lambda pair=pair: lan.starved.add(pair))
                lan.at(until, lambda pair=pair: lan.starved.discard(pair))

    def _starve(self, start: float, rng: Random) -> None:
        """Frames of stripes do not pass from one host to another, or from it to all."""
        hosts = range(len(self.lan.hosts))
        one, other = rng.sample(hosts, 2)
        pairs = {(one, k) for k in ([other] if rng.random() < 0.5 else hosts)}
        until = start + rng.choice(LASTS_S)
        self.lan.trouble(until)
        self.lan.at(start, lambda: self.lan.starved.update(pairs))
        self.lan.at(until, lambda: self.lan.starved.difference_update(pairs))

    # ---- whom, and when

    def lead(self, otherwise: Host) -> Host:
        """Who acts as node 1 now."""
        leads = (h for h in self.lan.hosts if not h.dead and h.node.leads)
        return next(leads, otherwise)

    def strike(self, kind: str, host: Host) -> None:
        """One fault of that kind."""
        if kind == "cut":
            self.cut()
        elif kind == "cut in three":
            self.cut(3)
        elif kind == "lose":
            self.lose()
        elif kind.startswith("lead "):
            self.strike(kind.removeprefix("lead "), self.lead(host))
        else:
            act: dict[str, Callable[[Host], None]] = {
                "kill": self.kill,
                "pause": self.pause,
                "program": self.kill_program,
                "sicken": self.sicken,
                "break": self.break_program,
                "leave": self.leave,
                "cancel": self.cancel,
                "hang": self.hang,
                "tamper": self.tamper,
                "renew": self.renew,
                "isolate": self.isolate,
            }
            act[kind](host)

    def at_time(self, time: float, kind: str, host: Host) -> None:
        """A fault at some time."""
        self.lan.trouble(time)
        self.lan.at(time, lambda: self.strike(kind, host))

    def at_moment(self, name: str, nth: int, kind: str) -> None:
        """A fault at the n-th time that anybody comes to that moment, to whoever it is."""
        self.when(MOMENTS[name], name, nth, kind)

    def when(self, moment: Moment, name: str, nth: int, kind: str) -> None:
        """The same, at a moment of another kind."""
        seen = 0

        def come(host: Host, action: Action) -> bool:
            nonlocal seen
            if not moment(host, action):
                return False
            seen += 1
            if seen < nth:
                return False
            self.lan.note(f"MOMENT {name} at {host.node.name}")
            if self.random.random() < 0.5:  # before it can do anything else
                self.lan.trouble(self.lan.now)
                self.strike(kind, host)
            else:  # perhaps in the middle of a broadcast
                self.at_time(self.lan.now + 2e-4 * self.random.random(), kind, host)
            return True

        self.lan.moments.append(come)


def member(host: Host) -> bool:
    """It takes part."""
    return not host.dead and host.node.state is NodeState.MEMBER
