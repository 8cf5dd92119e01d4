# SPDX-License-Identifier: Apache-2.0
"""The values that a job's settings fix, and the phases that its lead decides on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nicps import wire
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.script import is_script
from nicps.job.serving import SYNC_EVERY, Asked, second_begins
from nicps.job.under_way import UnderWay
from nicps.protocol.phase import Phase, equal_shares
from nicps.protocol.plan import ChannelPlan, fits
from nicps.protocol.serving import Serving
from nicps.protocol.view import View
from nicps.session import shared_form as says
from nicps.session.shared_form import has_steps, is_planned, is_served

MOST_FRAGMENTS = 1 << 26  # of a round, as `Phase.check` has it
#: Key of a member's answer to a training phase with stripes: the reason why its kernel takes none.
REFUSED = "refused"

#: The exchanges that a job's setting `exchange` can name; it can be `auto`, too.
_NAMED = Exchange.BROADCAST, Exchange.STRIPES, Exchange.SWITCH

_STOP_BYTES = 900  # of the reason, as JSON in a frame

_ALL = (1 << 31) - 1  # a quorum that needs every member

DEFAULT_UNIT = -40  # sums to 1.3e5 fit lanes of any width, with steps of 1e-12 at the fine end
DEFAULT_QUORUM = 0.9  # R13
DEFAULT_ALARM = 0.5  # R22
#: Fragments in a window, a hand-out's round: 23.6 MB, a fifth of a second at 1 Gbit/s. Receivers have room for two.
WINDOW_FRAGMENTS = 16384


@dataclass(frozen=True, slots=True)
class Plan:
    """The values that the job's settings fix.

    `alarm_below`: with fewer members than this part of those that began, the job is saved and stopped (R22).
    `admit`: hosts that were not there at the start may come in (R20). `redeal`: every host has all files; otherwise
    nobody can hand them out a second time. `exchange`: that of training rounds, where no Linux switch adds;
    `tries_switch`: one is taken where it is ready; `names_switch`: the user has asked for it. `feedback`: what rounding
    leaves over goes into later rounds (`Phase.feedback`). `window`: fragments in a hand-out's round. `group`: it is no
    job but a group (`nicps.collective`): programs that agents have not started, rounds of any size by stripes, no
    feedback, and nothing that is saved or shown; `waits_for`: its name and size. `script`: its files are handed out,
    and that is all. `steps`: a step of training takes several rounds of any size, by stripes, with all members and
    without feedback: its program knows what they hold. `servers`: parameters are at servers, with
    a synchronisation after `every` pushes, whose `staleness` counts; None: at all members. `sets`: the first fragment
    of parameters of set 2, where workers have partners (B3), or 0. `planned`: a step of training takes the rounds of a
    plan, by stripes, on several channels (docs/channels.md). `asked`: the job's setting `exchange`. `leaves_switch`:
    the lead believes a Linux switch, which cannot add what this job has.
    """

    job: str
    batch: int
    width: int
    quorum: float = DEFAULT_QUORUM
    unit: int = DEFAULT_UNIT
    alarm_below: float = DEFAULT_ALARM
    admit: bool = False
    redeal: bool = True
    exchange: Exchange = Exchange.BROADCAST
    window: int = WINDOW_FRAGMENTS
    tries_switch: bool = False
    names_switch: bool = False
    feedback: bool = True
    group: bool = False
    waits_for: tuple[str, int] = ("", 0)
    script: bool = False
    steps: bool = False
    servers: Asked | None = None
    every: int = 0
    staleness: bool = True
    sets: int = 0
    channels: int = 0
    planned: bool = False
    asked: str = "auto"
    leaves_switch: bool = False

    @classmethod
    def of(
        cls,
        job: str,
        settings: Mapping[str, Any],
        exchange: Exchange,
        *,
        believes_switch: bool = False,
        sets: Sequence[int] = (),
    ) -> Plan:
        """Make the plan of a prepared job's settings, and the lead's own; `believes_switch`: the lead believes a
        Linux switch. `sets`: numbers of each set, if its branches were packed (B1).
        """
        asked, group, steps = _asked(settings), is_group(settings), has_steps(settings)
        servers = Asked.of(settings) if is_served(settings) else None
        planned = is_planned(settings)
        # Its sums are made by the members alone.
        alone = group or steps or planned or servers is not None
        waits_for = (settings["group"]["name"], settings["group"]["size"]) if group else ("", 0)
        return cls(
            job,
            int(settings["batch"]),
            int(str(settings.get("lane", "i16")).removeprefix("i")),
            float(settings.get("quorum", DEFAULT_QUORUM)),
            int(settings.get("unit", DEFAULT_UNIT)),
            float(settings.get("alarm_below", DEFAULT_ALARM)),
            bool(settings.get("admit", group)),
            bool(settings.get("redeal", True)),
            exchange,
            tries_switch=believes_switch and not alone and asked in ("auto", Exchange.SWITCH.name),
            names_switch=asked == Exchange.SWITCH.name,
            feedback=bool(settings.get("feedback", not alone)),
            group=group,
            waits_for=waits_for,
            script=is_script(settings),
            steps=steps,
            servers=servers,
            every=SYNC_EVERY if (every := settings.get("sync_every")) is None else int(every),
            staleness=bool(settings.get("staleness", True)),
            sets=second_begins(settings, sets),
            channels=int(settings.get("priorities") or 0) if servers is not None else 0,
            planned=planned,
            asked=asked,
            leaves_switch=believes_switch and alone and not group,
        )

    @property
    def why(self) -> str:
        """The reason for `exchange`, for people."""
        if self.leaves_switch:
            own = replace(self, leaves_switch=False)
            return (
                f"{own.why}, and the Linux switch that this host believes adds nothing of this job"
            )
        if self.servers is not None:
            return "the parameters are at servers"
        if self.group or self.steps or self.planned:
            return "rounds of several sizes need it"
        if self.asked != "auto":
            return "the job's setting"
        if self.exchange.needs_trust:
            return "auto, and this host believes a P4 switch (--mode switch)"
        return "auto, and this host believes no switch"

    @property
    def sized(self) -> bool:
        """Rounds of training have a size each (`Phase.sized`)."""
        return self.group or self.steps

    def called(self, view: View) -> str:
        """The names that hosts on standby are called for."""
        return str(UnderWay(*self.waits_for, len(view.members))) if self.group else self.job

    @staticmethod
    def choose(
        settings: Mapping[str, Any], own: Exchange, *, believes_switch: bool = False
    ) -> Exchange:
        """The exchange of a job with these settings without a ready Linux switch: a P4 switch's, or `stripes`.

        Args:
            own: `Exchange.SWITCH` if this host believes a P4 switch.
            believes_switch: this host believes a Linux switch.

        Raises:
            JobFailed: the setting is no exchange, or one that this host does not believe.
        """
        name = _asked(settings)
        if is_served(settings):
            if name != "auto":
                raise JobFailed(f"the job's exchange is {name}, and with servers it must be auto")
            return Exchange.SERVERS
        if has_steps(settings) or is_planned(settings):
            if name not in ("auto", Exchange.STRIPES.name):
                keys = "priorities" if is_planned(settings) else "rank or bucket_mb"
                raise JobFailed(
                    f"the job's exchange is {name}, and with {keys} it must be stripes or auto"
                )
            return Exchange.STRIPES
        if name == "auto":
            return own if own.needs_trust else Exchange.STRIPES
        exchange = next((each for each in _NAMED if each.name == name), None)
        if exchange is None:
            raise JobFailed(
                f"the job's exchange is {name}, and it must be auto, broadcast, stripes or switch"
            )
        if not exchange.needs_trust or own.needs_trust:
            return exchange
        if believes_switch:
            return Exchange.STRIPES
        raise JobFailed(
            f"the job's exchange is {name}, and this host has not been told to believe one: run `nicps join` with"
            " --trust-switch or --switch-key for a Linux switch, or with --mode switch for a P4 switch"
        )

    def hand_out(
        self, view: View, first_round: int, purpose: str, source: int, size: int, index_bytes: int
    ) -> Phase:
        """A stream of `size` bytes goes from the member `source` to all (R5, R6)."""
        window_bytes = self.window * wire.PAYLOAD_BYTES
        rounds = max(1, -(-size // window_bytes))
        last = max(1, -(-(size - (rounds - 1) * window_bytes) // wire.PAYLOAD_BYTES))
        return Phase(
            number=0,
            generation=0,
            kind=wire.PhaseKind.HANDOUT,
            first_round=first_round,
            rounds=rounds,
            fragments=last if rounds == 1 else self.window,
            last_fragments=last,
            shares=tuple(int(m.number == source) for m in view.members),
            quorum=1,
            settings={
                "job": self.job,
                "source": source,
                "bytes": size,
                "index_bytes": index_bytes,
                "purpose": purpose,
            },
        )

    def training(
        self,
        view: View,
        first_round: int,
        counted: Collection[int],
        fragments: int,
        unit: int,
        exchange: Exchange,
        serving: Serving | None = None,
        channels: tuple[ChannelPlan, ...] = (),
    ) -> Phase:
        """These members train, until the next decision; those that serve only do so if the job says so.

        With `channels`, the plan of a step, `fragments` are not looked at.
        """
        if channels:
            fragments = channels[0].room
        if serving is not None and not (self.servers is not None and self.servers.train):
            counted = set(counted).difference(serving.servers)
        batch = max(self.batch, len(counted))  # a member without a share is not counted
        return Phase(
            number=0,
            generation=0,
            kind=wire.PhaseKind.TRAIN,
            first_round=first_round,
            fragments=fragments,
            last_fragments=fragments,
            width=self.width,
            shares=equal_shares(batch, len(view.members), counted),
            quorum=_ALL if self.sized or serving else math.ceil(self.quorum * batch - 1e-9),
            unit=unit,
            exchange=exchange,
            feedback=self.feedback,
            sized=self.sized,
            serving=serving,
            channels=channels,
        )


def read_plan(
    settings: Mapping[str, Any], told: Sequence[says.ChannelPlan]
) -> tuple[ChannelPlan, ...]:
    """The plan that a training program has told of.

    Raises:
        JobFailed: it cannot be meant, or the job's steps have none.
    """
    group = is_group(settings)
    channels = tuple(
        ChannelPlan(c.urgency, max(c.rounds, default=0), () if group else c.rounds) for c in told
    )
    if (is_planned(settings) or group) is not bool(channels):
        raise JobFailed("a training program tells the plan of its steps where priorities is set")
    limit = wire.MOST_SIZED if group else MOST_FRAGMENTS
    if channels and not fits(channels, limit, sized=group):
        shown = ", ".join(str(list(channel.rounds)) for channel in channels)
        raise JobFailed(f"a step cannot have these rounds on its channels: {shown[:200]}")
    return channels


def is_group(settings: Mapping[str, Any]) -> bool:
    """Whether these settings are those of a group."""
    return isinstance(settings.get("group"), Mapping)


def _asked(settings: Mapping[str, Any]) -> str:
    """The job's setting `exchange`."""
    return str(settings.get("exchange", "auto"))


def test_round(view: View, first_round: int, counted: Collection[int]) -> Phase:
    """These members count how many of their test records succeeded and failed (R15)."""
    shares = tuple(int(m.number in counted) for m in view.members)
    return Phase(
        number=0,
        generation=0,
        kind=wire.PhaseKind.TEST,
        first_round=first_round,
        rounds=1,
        fragments=1,
        last_fragments=1,
        width=32,
        shares=shares,
        quorum=sum(shares),
    )


def stop(
    reason: str | None, *, alarm: bool = False, saved: bool = False, cancelled: bool = False
) -> Phase:
    """The job ends everywhere, well (`reason` is None) or not."""
    message = (reason or "").encode()[:_STOP_BYTES].decode(errors="ignore")
    settings = {"ok": reason is None, "message": message, "alarm": alarm, "saved": saved}
    if cancelled:
        settings["cancelled"] = True
    return Phase(0, 0, wire.PhaseKind.STOP, settings=settings)


@dataclass(frozen=True, slots=True)
class Found:
    """The stage of the job at a host that takes the lead over.

    `able`: it has the job's files. `trained`: its training program has committed rounds, and tells again what comes
    after the last. `finishing`: the end has been decided already. `unit`: the next training round's, once one has
    counted; `exchange`: that of the phase in which it has. `failed`: exchanges that are given up, or not believed
    here. `anew`: those that were given up before the phase in force are not among them, and are tried again. `crash`:
    what ended this host's last training program, if one has crashed. `servers`: of the last training phase, by rank.
    `channels`: the plan of that phase. `stop`: how the job has ended already, at this host.
    """

    able: bool
    trained: bool
    finishing: bool
    unit: int | None = None
    exchange: Exchange = Exchange.BROADCAST
    failed: frozenset[Exchange] = frozenset()
    anew: bool = False
    crash: str = ""
    servers: tuple[int, ...] = ()
    channels: tuple[ChannelPlan, ...] = ()
    stop: Phase | None = None
