# SPDX-License-Identifier: Apache-2.0
"""A run of `nicps run` at the host that has started it: the scripts of all hosts, and its end (docs/run.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nicps import wire
from nicps.agent.printed import Printed
from nicps.agent.relay import OutputReceiver
from nicps.agent.shown import Shown
from nicps.errors import JobFailed, NicpsError
from nicps.job.script import LaunchScript
from nicps.job.text import one_line
from nicps.session.events import Warned
from nicps.session.messages import Error, Result
from nicps.wire import ScriptStep, ScriptStream

_MOST_REPORT = 1200  # bytes
_START_S = 15.0  # for the first sign of life of every host
_KILL_LIMIT_S = 10.0  # for the others' scripts to end
_FORMS_S = 10.0  # for all scripts to come to the group for which the first one waits
_COMES_S = 30.0  # for any script to come to a group; it may need none
_NONE_CAME = (
    f"no script has come to a group of nicps within {_COMES_S:.0f} s. If the scripts wait for one, they have another"
    " backend, or lack `import nicps.torch`, and wait for each other at MASTER_ADDR: at localhost for ever"
)


@dataclass(slots=True)
class _Other:
    """Another host of the run. `heard`: it has given a sign of life. `waits`: its script waits for its group."""

    name: str
    rank: int
    receiver: OutputReceiver
    heard: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class _Host:
    """The result of the script at a host.

    Attributes: `code`, None if the host was lost; `weights`, their digest; `not_kept`, why files that it has left are
    not in the run's folder; `removed`, those that it has written elsewhere (`nicps.agent.left.written`).
    """

    code: int | None
    weights: str = ""
    not_kept: str = ""
    removed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, report: bytes) -> _Host:
        """What that host has reported."""
        try:
            found = orjson.loads(report[:_MOST_REPORT])
            code, weights = found["code"], str(found.get("weights", ""))[:64]
            not_kept = one_line(found.get("not_kept", ""))
            removed = found.get("removed", {})
            if removed:
                first = [one_line(name) for name in removed["first"]]
                removed = {"files": int(removed["files"]), "first": first}
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            return cls(JobFailed.exit_code)
        known = type(code) is int and 0 <= code <= 255
        return cls(code if known else JobFailed.exit_code, weights, not_kept, removed)


class Started:
    """A run, as the host that has started it sees it.

    Args:
        runs: the folder of results.
        own: the output of this host's script.
        send: sends a frame to the host of that rank: what it is for, a place in the stream, the rank.

    Attributes: `over`, the command was told how it has ended.
    """

    def __init__(
        self,
        launch: LaunchScript,
        shown: Shown,
        now: float,
        runs: Path,
        own: Printed,
        send: Callable[[ScriptStep, int, int], None],
    ) -> None:
        self.shown, self.over = shown, False
        self._launch, self._began, self._runs, self._own, self._send = launch, now, runs, own, send
        self._name = launch.hosts[launch.rank][0]
        self._others = {
            mac: _Other(name, rank, OutputReceiver(now))
            for rank, (name, mac) in enumerate(launch.hosts)
            if rank != launch.rank
        }
        self._found: dict[str, _Host] = {}
        self._ends: NicpsError | None = None
        self._ends_by = 0.0
        self._formed = self._warned = False
        self._came = False  # a script has come to a group or to its end, or the command was told that none has
        self._waits_since: float | None = None  # a script waits for its group

    @property
    def _names(self) -> list[str]:
        """By rank."""
        return [name for name, _ in self._launch.hosts]

    # ---- what comes of the scripts

    def take_output(self, now: float, source: bytes, body: wire.Script, tail: bytes) -> None:
        """A frame of another host."""
        other = self._others.get(source)
        if other is None:
            return
        other.heard, other.waits = True, bool(body.waits)
        if self.shown.full and body.step == ScriptStep.OUTPUT and tail:
            other.receiver.note_alive(now)  # the host sends it again
            self._send(ScriptStep.SEEN, other.receiver.seen, other.rank)
            return
        if other.name in self._found and not other.receiver.ended:
            del self._found[other.name]  # it was taken for lost
        new = other.receiver.take(now, body, tail)
        if new is not None and body.step == ScriptStep.END:
            self.note_end(other.name, new)
        elif new is not None:
            self.shown.forward(other.name, ScriptStream(bool(body.stream)), new)
        self._send(ScriptStep.SEEN, other.receiver.seen, other.rank)

    def note_end(self, name: str, report: bytes) -> None:
        """The script of that host has ended."""
        self._found[name] = _Host.of(report)

    def tick(self, now: float, forming: bool, in_group: bool) -> bool:
        """Show this host's output, check for lost hosts, and whether the run is over; return whether to end it here.

        Args:
            forming: this host's script waits for its group.
            in_group: it is in it.
        """
        self.shown.forward_own(self._name, self._own)
        for other in self._others.values():
            if self._ends is not None and other.receiver.kills(now):
                self._send(ScriptStep.KILL, 0, other.rank)
            if other.receiver.ended or other.name in self._found:
                continue
            late = not other.heard and now > self._began + _START_S
            if late or (other.heard and other.receiver.is_lost(now)):
                what = "was lost" if other.heard else "did not start"
                text = f"nicps: {other.name} {what}\n".encode()
                self.shown.forward(other.name, ScriptStream.STDERR, text)
                self._found[other.name] = _Host(None)
        self._formed |= in_group
        gives_up = self._watch_group(now, forming)
        everywhere = len(self._found) == len(self._launch.hosts)
        all_shown = everywhere and self.shown.has_own(self._own)
        if all_shown or (self._ends is not None and now > self._ends_by):
            self._finish(now)
        return gives_up

    # ---- the group of the scripts

    def _watch_group(self, now: float, forming: bool) -> bool:
        """Whether the run ends, as scripts wait for one that has failed."""
        waiting = {
            *([self._name] if forming else []),
            *(each.name for each in self._others.values() if each.waits),
        }.difference(self._found)
        self._came |= bool(waiting or self._found) or self._formed or self._ends is not None
        if not self._came and now > self._began + _COMES_S:
            self._came = True
            self._warn(_NONE_CAME)
        if not waiting or self._formed or self._ends is not None:
            self._waits_since = None
            return False
        if failed := [n for n in self._names if n in self._found and self._found[n].code != 0]:
            self._give_up(now, failed[0])
            return True
        if self._waits_since is None:
            self._waits_since = now
        elif now > self._waits_since + _FORMS_S and not self._warned:
            self._warned = True
            self._warn_of_group([name for name in self._names if name not in waiting])
        return False

    def _give_up(self, now: float, name: str) -> None:
        """The script on that host has failed, and cannot join the group for which the others wait."""
        code = self._found[name].code
        how = "was lost" if code is None else f"ended with exit code {code}"
        error = JobFailed(f"the script on {name} {how} before all had joined the group")
        if code is not None:
            error.exit_code = code
        self.end(now, error)

    def _warn_of_group(self, missing: list[str]) -> None:
        """Scripts wait for those of the other hosts, which may be on their way."""
        if not missing:
            return
        ended = [name for name in missing if name in self._found]
        less = f"; on {', '.join(ended)} it has ended without" if ended else ""
        self._warn(
            f"no group has formed for {_FORMS_S:.0f} s: the script has not called init_process_group (or Group.form) on"
            f" {', '.join(missing)}{less}"
        )

    def _warn(self, text: str) -> None:
        self.shown.send(Warned(self._launch.job, text))

    # ---- the end

    def end(self, now: float, reason: NicpsError) -> None:
        """End the run; the first reason counts."""
        if self._ends is None:
            self._ends, self._ends_by = reason, now + _KILL_LIMIT_S

    def kill_all(self) -> None:
        """Tell all other hosts once to end their scripts."""
        for other in self._others.values():
            self._send(ScriptStep.KILL, 0, other.rank)

    def _finish(self, now: float) -> None:
        self.over = True
        if self._ends is not None:
            self.shown.send(Error.of(self._ends))
            return
        found = {name: self._found[name] for name in self._names}  # by rank
        codes = {name: host.code for name, host in found.items()}
        told = {host.weights for host in found.values() if host.weights}
        result = {
            "job_id": self._launch.job,
            "hosts": len(codes),
            "exit_codes": codes,
            "lost": [name for name, code in codes.items() if code is None],
            "seconds": round(now - self._began, 3),
            "weights_identical": len(told) == 1 if told else None,
            "folder": str(self._runs / self._launch.job),
            "not_kept": {name: host.not_kept for name, host in found.items() if host.not_kept},
            "removed": {name: host.removed for name, host in found.items() if host.removed},
        }
        self.shown.send(Result(result))
