# SPDX-License-Identifier: Apache-2.0
"""The receivers of messages about a job: the submitter, the watchers, and the user's command for an alarm (R14,
R18, R22).
"""

from __future__ import annotations

from nicps.agent.children import Children
from nicps.agent.control import ControlSocket
from nicps.agent.driver import log
from nicps.agent.process import Child
from nicps.agent.settings import AgentSettings
from nicps.errors import NicpsError
from nicps.job.actions import Log, Publish, RunHook
from nicps.session.messages import Error, Result


class Notifier:
    """Connections that wait for a job's end, or watch, and the alarm's hook."""

    def __init__(self, control: ControlSocket, children: Children, settings: AgentSettings) -> None:
        self._control, self._children, self._settings = control, children, settings

    def log(self, action: Log) -> None:
        """One line for the operator."""
        log(action.text)

    def publish(self, action: Publish) -> None:
        """Publish to a submitter until its job has ended, and to watchers always."""
        ends = isinstance(action.message, Result | Error)
        for peer in self._control.peers[:]:
            waits = action.submission != 0 and peer.submission == action.submission
            if waits or peer.watches_all:
                self._control.post(peer, action.message)
            if waits and ends:
                peer.submission = 0

    def run_hook(self, action: RunHook) -> None:
        """Run the user's alarm hook."""
        runs, hook = self._settings.runs, self._settings.alarm_hook
        if not hook:
            return
        try:
            runs.mkdir(parents=True, exist_ok=True)
            child = self._children.spawn(
                ["/bin/sh", "-c", hook, "nicps", action.reason],
                runs,
                runs / "alarm.log",
                lambda code: _note_end(child, code),
                as_owner=True,
                network_access=True,
            )
        except (OSError, NicpsError) as error:
            log(f"the alarm's hook cannot be run: {error}")


def _note_end(hook: Child, code: int) -> None:
    if hook.failure:
        log(f"the alarm's hook cannot be run: {hook.failure}")
    elif code:
        log(f"the alarm's hook ended with {code}")
