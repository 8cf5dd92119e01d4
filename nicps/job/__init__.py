# SPDX-License-Identifier: Apache-2.0
"""The life of a job at one host as pure state machines: events and `now` come in, actions go out.

Events and actions, and the parts between them:

    life.py           every event
    actions.py        the actions of the host
    slow_work.py      the kinds of tasks, which a thread of the agent does
    dispatcher.py     the consequences of an event, in order
    orders.py         the orders of the parts to the node and to one another
    tasks.py          work that takes time: tickets, and what follows when a task is done
    node_info.py      what the parts read of the node
    publisher.py      messages to users: events, the end of a job, `nicps status`
    text.py           texts of others in one line

Its roles in a job:

    roles.py          how each role begins and ends
    submission.py     a job submitted here, until it has ended
    lead.py           the lead's side, and what it needs of this host's own part
    course.py         the lead's decisions, from the first hand-out to the end (R5 to R7, R14, R15, R20 to R22)
    joiners.py        the hosts that want to come into the job (R20)
    choice.py         the exchange of the next training phase
    serving.py        which members serve parameters, and what a host needs for its part
    served.py         what there is of that in the kernel
    steps.py          the training steps at one host, of one round each or of several
    under_way.py      a group that is under way, as its lead names it
    script.py         a script of `nicps run`, whose files are only handed out
    plan.py           what a job's settings fix; the phases that the lead decides on

Its part in it:

    part.py           what each phase and view asks of this host and its training program
    handed_job.py     the job as it was handed out
    dialogue.py       the training program's messages, and what follows from each
    entry.py          its way into a phase
    program.py        what one training program owes and is told
    owed.py           the rounds that it owes, of a step or one at a time
    programs.py       the series of training programs, started and lost
    contribution.py   the gradient on its way
    handout.py        files between the members
    accumulators.py   the kernel's room for a phase
    finish.py         the end at this host: saved, kept, collected
    checkpoints.py    the checkpoint that `nicps resume` goes on from
"""

from nicps.job.life import Life
from nicps.job.roles import LifeSettings

__all__ = ["Life", "LifeSettings"]
