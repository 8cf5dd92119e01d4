# SPDX-License-Identifier: Apache-2.0
"""The host's agent: `nicps join`.

The loop and what it waits for:

    agent.py        the event loop around the life of a job; here the agent is put together
    driver.py       actions of the life of a job, in their order
    settings.py     the settings of `nicps join`
    loop.py         descriptors, signals, and work that a thread has done
    background.py   slow work, in one thread and in order

Frames:

    frames.py       frames in and out, the words shared with the XDP program, the interface's state
    sender.py       the frames that leave, in order
    priorities.py   which of them go first: a queue and a TX ring for each channel
    striped.py      headers and destinations of frames of stripes
    sources.py      where a contribution's payload comes from
    keyring.py      the network's key and the views', which control frames are admitted
    probe.py        measurements of the LAN (`nicps doctor --network`)
    scripts.py      the script of `nicps run`, and its output
    started.py      such a run at the host that has started it
    printed.py      the output of a script: two files as one stream
    left.py         the files that a script leaves
    shown.py        the messages to `nicps run`
    relay.py        the output of a script, on its way to the host that has started it
    direct.py       what a group's program is given for direct calls
    stores.py       the store that the members of a group share

The socket:

    control.py      the UNIX socket, and which users may do what at it
    peer.py         a connection and its limits
    closing.py      closing a connection, which may take long
    commands.py     messages of commands and training programs
    group.py        a program that waits for a group
    status.py       what `nicps status`, `nicps top` and the metrics show
    tally.py        the counts for these three
    waits.py        how long rounds wait, and for which host, for these three and the result
    flows.py        the rounds of channels, for these three and the time line
    exporter.py     metrics for Prometheus, over HTTP
    families.py     the list of metrics
    notifier.py     messages to the operator, submitters and watchers; the alarm's hook

A job:

    executor.py     files and accumulators of a job; tasks, which a thread does
    jobfiles.py     a job's files on this host, from its begin to its end
    preparation.py  the preparation of a submitted job
    prepared.py     what a job's preparation left: settings, files, model
    program.py      the training program's process, memory and connection
    served_room.py  what the job here has of parameter servers
    served.py       the part of the parameters that this host serves
    served_frames.py  frames to parameter servers
    crash.py        how a training program ended, in words
    metrics.py      the rows that a training program writes, checked
    bundle.py       files as a stream for the hand-out, and back
    records.py      what a job leaves on this host
    lives.py        what is kept of agents and programs that ended before their job
    result.py       the result of a run
    report.py       the picture of a run

Processes and folders:

    process.py      training code as another user's process
    children.py     all child processes, from their starts to their ends
    orphans.py      processes that a job's code has detached
    folders.py      working folders, and names of runs
"""

from nicps.agent.agent import Agent
from nicps.agent.settings import AgentSettings

__all__ = ["Agent", "AgentSettings"]
