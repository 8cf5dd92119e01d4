# SPDX-License-Identifier: Apache-2.0
"""The PyTorch trainer with a session that records (`recording`).

python -P recording_trainer.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trainer.run
from nicps.startup import leave
from tests.netns.recording import Recording
from trainer.__main__ import main

if __name__ == "__main__":
    Recording.folder = Path(sys.argv[1])
    trainer.run.Session = Recording  # type: ignore[misc]
    leave(main(["run", "--workdir", os.getcwd()]))
