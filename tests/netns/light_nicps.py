# SPDX-License-Identifier: Apache-2.0
"""The `nicps` command, whose `submit` and `resume` name `light`: their jobs need no PyTorch."""

from __future__ import annotations

from dataclasses import replace

from nicps.cli import main, submit
from nicps.session import commands
from nicps.session.channel import Channel
from nicps.session.messages import Submit
from nicps.startup import leave

ENTRY = "tests.netns.light"


def send(channel: Channel, job: Submit) -> None:
    """As the command does it, with one word more."""
    commands.submit(channel, replace(job, entry=ENTRY))


if __name__ == "__main__":
    submit.send = send
    leave(main())
