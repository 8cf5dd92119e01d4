# SPDX-License-Identifier: Apache-2.0
"""The host's agent: `nicps join`.

The loop and what it waits for:

    agent.py        the event loop around the state machines
    settings.py     what `nicps join` was told
    loop.py         descriptors, signals, and work that a thread has done
    background.py   slow work, in one thread and in order

Frames:

    frames.py       frames in and out, the words shared with the XDP program, the interface's state
    sender.py       what leaves, in order
    sources.py      where a contribution's payload comes from
    keyring.py      the network's key and the views', which control frames are admitted
    probe.py        measurements of the LAN (`nicps doctor --network`)

The socket:

    control.py      the UNIX socket, and who may do what there
    peer.py         a connection and its limits
    closing.py      closing a connection, which may take long
    commands.py     messages of commands and training programs
    status.py       what `nicps status` shows

A job:

    submission.py   a job submitted here, until it has ended
    prepared.py     what a job's preparation left: settings, files, model
    conductor.py    the lead's side of a job
    job.py          this host's part in a job
    program.py      the training program, and what is said to it
    views.py        what a change of the view asks of this host
    handout.py      files between the members
    bundle.py       files as a stream for the hand-out, and back
    checkpoints.py  what `nicps resume` goes on from
    finish.py       the end at this host: saved, kept, collected
    endings.py      how a job ends, and who is told
    records.py      what a job leaves on this host
    result.py       what a run comes to
    report.py       the picture of a run

Processes and folders:

    process.py      training code as another user's process
    children.py     all child processes, from their starts to their ends
    strays.py       processes that a job's code has detached
    folders.py      working folders, and names of runs
"""

from nicps.agent.agent import Agent
from nicps.agent.settings import AgentSettings

__all__ = ["Agent", "AgentSettings"]
