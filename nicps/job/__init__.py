# SPDX-License-Identifier: Apache-2.0
"""The life of a job at one host as pure state machines: events and `now` come in, actions go out.

course.py   what the lead decides, from the first hand-out to the end (R5 to R7, R14, R15, R20 to R22)
plan.py     what a job's settings fix; the phases that the lead decides on
orders.py   what the machines ask for
place.py    where this host is in the network
"""

from nicps.job.life import Life
from nicps.job.roles import LifeSettings

__all__ = ["Life", "LifeSettings"]
