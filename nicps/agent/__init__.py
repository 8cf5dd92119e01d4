# SPDX-License-Identifier: Apache-2.0
"""The host's agent: `nicps join`.

agent.py       the event loop around the state machines
control.py     the UNIX socket: commands and the training program
job.py         this host's part in a job
conductor.py   node 1's side of a job
bundle.py      files as a stream for the hand-out, and back
sender.py      what leaves, in order
process.py     training code as another user's process
result.py      what a run comes to
"""

from nicps.agent.agent import Agent
from nicps.agent.settings import AgentSettings

__all__ = ["Agent", "AgentSettings"]
