# SPDX-License-Identifier: Apache-2.0
"""What the node of a simulated host does, one action after the other, held against the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nicps import protocol, wire
from nicps.job import Life, LifeSettings
from nicps.job.dispatcher import Dispatcher
from nicps.protocol import Phase

if TYPE_CHECKING:
    from tests.simulator.host import Host


@dataclass(slots=True)
class About:
    """The node's action that the life of the job deals with next; the phase that this host had prepared last."""

    action: protocol.Action
    prepared: Phase | None


@dataclass(slots=True)
class Done:
    """The life of the job has dealt with it."""

    action: protocol.Action


class WatchedDispatcher(Dispatcher):
    """Says among the actions what they come from."""

    def _carry_out_action(self, now: float, action: protocol.Action) -> None:
        about: Any = About(action, self.part.phase if self.part is not None else None)
        self._out.append(about)
        super()._carry_out_action(now, action)
        done: Any = Done(action)
        self._out.append(done)


class WatchedLife(Life):
    """With such a dispatcher."""

    def __init__(self, mac: bytes, settings: LifeSettings, host: Host) -> None:
        super().__init__(
            mac, settings, host.receiver(), lambda: host.lan.random.getrandbits(63) + 1
        )
        self._dispatcher = WatchedDispatcher(settings, self.node, self.roles)


class Watch:
    """Attributes: `source`, of the hand-out that is under way; `restores`: the host has come in the middle of a job."""

    def __init__(self, host: Host) -> None:
        self.source: Host | None = None
        self.restores = False
        self._host = host
        self._stop: object = None  # that the host has decided on

    def check(self, about: About) -> None:
        """Note the action, and hold it against the rules."""
        host, action = self._host, about.action
        checks = host.lan.checks
        match action:
            case protocol.Installed(view, _, phase):
                on = f"goes on: {phase.kind.name}" if phase else "no phase"
                host.note(
                    f"VIEW {view.number} live {sorted(view.live)} lead {view.lead}, "
                    f"round {host.node.open_round}, {on}"
                )
                checks.installed(host, action)
            case protocol.Ready(view):
                host.note(f"READY view {view.number}")
            case protocol.Prepare(phase):
                host.note(f"PREPARES {phase.kind.name} {phase.number} from {phase.first_round}")
                if phase.kind is wire.PhaseKind.TRAIN:
                    checks.unit_of(phase)
                if phase.kind is wire.PhaseKind.STOP:
                    self._stops(phase)
            case protocol.PhaseAgreed(phase):
                host.note(f"AGREED {phase.kind.name} {phase.number}")
                if phase.kind is wire.PhaseKind.STOP:
                    self._over(phase.settings["message"], ok=phase.settings["ok"])
            case protocol.Committed():
                self._check_commit(action, about.prepared)
            case protocol.Evicted(reason, ending):
                host.note(f"STRUCK {reason}")
                if ending:
                    self._over(reason, ok=ending is wire.Ending.DONE)
            case protocol.Differs():
                host.note(f"DIFFERS {action}")
                checks.differs(host, action)
            case protocol.NoProgress():
                host.note(f"NO PROGRESS {action}")
            case protocol.Cut(missing):
                host.note(f"NO MAJORITY, {sorted(missing)} are silent")
            case protocol.NotAdded(round_):
                host.note(f"NOT ADDED, round {round_}")
            case protocol.Declined(reason):
                host.note(f"DECLINES {reason}")
            case protocol.Cancelled(name):
                host.note(f"{name} CANCELS")
            case protocol.Failed(reason):
                host.note(f"FAILED {reason}")
                checks.failed(host, action)

    def _stops(self, phase: Phase) -> None:
        host = self._host
        if not host.node.leads:
            self._over(phase.settings["message"], ok=phase.settings["ok"])
        elif self._stop != phase.settings:  # not a repeat
            self._stop = phase.settings
            host.lan.checks.stops(host, phase)

    def _over(self, why: str, *, ok: bool) -> None:
        host = self._host
        host.note(f"JOB OVER {why}")
        host.job_over = why or "well"
        host.lan.over(host, why, ok)

    def _check_commit(self, commit: protocol.Committed, prepared: Phase | None) -> None:
        host = self._host
        host.note(f"COMMITS {commit.round} {dict(commit.counted)}")
        checks, phase = host.lan.checks, commit.phase
        checks.in_time(host, commit, prepared)
        checks.committed(host, commit, phase)
        checks.decided_before(host, commit)
        if phase.kind is wire.PhaseKind.HANDOUT:
            source = host.node.view.members[phase.settings["source"] - 1].mac
            self.source = next(one for one in host.lan.hosts if one.mac == source)
            self.restores = phase.settings["purpose"] != "job"
        elif phase.kind is wire.PhaseKind.TRAIN:
            host.committed = checks.last_trained(host, commit)
