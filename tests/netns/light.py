# SPDX-License-Identifier: Apache-2.0
"""The trainer without PyTorch, a module for jobs to name: `python -m tests.netns.light prepare|run|report`."""

from __future__ import annotations

import os
import sys

import trainer.__main__
from nicps.startup import leave


def main(command: str) -> int:
    """What each needs is imported where it is used: a report needs no NumPy."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads take as long as the rest of NumPy
    if command == "prepare":
        from tests.netns import light_prepare

        return light_prepare.main(__spec__.name)
    if command == "run":
        from tests.netns import light_trainer

        return light_trainer.main()
    return trainer.__main__.main()


if __name__ == "__main__":
    leave(main(sys.argv[1]))
