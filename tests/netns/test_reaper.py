# SPDX-License-Identifier: Apache-2.0
"""A test process that is killed: its reaper takes down what it leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.netns.labs import ROOT, leftovers, until

KILLED = """
import sys, time
from nicps.lab import Lab, LabSettings
from tests.reaper import fresh_folder, fresh_name

lab = Lab(LabSettings(fresh_name(), 2))
lab.up()
lab.run(lab.hosts[0], ["sleep", "60"])
print(lab.name, fresh_folder(), flush=True)
time.sleep(60)
"""


def test_a_killed_test_process_leaves_no_lab_and_no_folder() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name, folder = process.stdout.readline().split()
        try:
            assert leftovers(name).keys() >= {"namespaces", "state", "processes"}
        finally:
            process.kill()
    until(lambda: not leftovers(name) and not Path(folder).exists(), "the reaper", timeout_s=20)
