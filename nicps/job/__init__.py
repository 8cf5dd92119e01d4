# SPDX-License-Identifier: Apache-2.0
"""The life of a job at one host as pure state machines: events and `now` come in, actions go out.

Events, actions, and what is between:

    life.py           every event
    actions.py        what is asked of the host
    dispatcher.py     what follows from an event, in order
    orders.py         what the parts ask of the node and of one another
    tasks.py          what takes time: tickets, and what follows when a task is done
    node_info.py      what the parts read of the node
    publisher.py      what users see: events, the end of a job, `nicps status`
    text.py           texts of others in one line

Its roles in a job:

    roles.py          how each role begins and ends
    submission.py     a job submitted here, until it has ended
    lead.py           the lead's side, and what that needs of this host's own part
    course.py         what the lead decides, from the first hand-out to the end (R5 to R7, R14, R15, R20 to R22)
    choice.py         which exchange the next training phase has
    serving.py        which members serve parameters, and what a host needs for its part
    steps.py          the training steps at one host, of one round each or of several
    under_way.py      a group that is under way, as hosts are told of it
    script.py         a script of `nicps run`, whose files are handed out, and that is all
    plan.py           what a job's settings fix; the phases that the lead decides on

Its part in it:

    part.py           what each phase and view asks of this host and its training program
    entry.py          its way into a phase
    program.py        what one training program owes and is told
    programs.py       the series of training programs, started and lost
    contribution.py   the gradient on its way
    handout.py        files between the members
    accumulators.py   the kernel's room for a phase
    finish.py         the end at this host: saved, kept, collected
    checkpoints.py    what `nicps resume` goes on from
"""

from nicps.job.life import Life
from nicps.job.roles import LifeSettings

__all__ = ["Life", "LifeSettings"]
