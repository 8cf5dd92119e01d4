# SPDX-License-Identifier: Apache-2.0
"""Five minutes of faults at random, on a job with a key (docs/faults.md). A failure prints its seed."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from nicps import wire
from tests.netns.members import RECORDING
from tests.netns.scenes import Drill, Stage

SECONDS = 300.0


class Chaos:
    """One fault after the other; each leaves all hosts in training."""

    def __init__(self, drill: Drill, dice: random.Random) -> None:
        self.drill = drill
        self.lab = drill.stage.lab
        self.dice = dice
        self.astray: set[str] = set()
        self.alone = True  # nothing else happens at the same time

    def killed(self, host: str) -> None:
        self.lab.kill(host, self.dice.choice(["agent", "both"]))  # type: ignore[arg-type]
        self.drill.stage.end(host, signal.SIGKILL)
        self.drill.stage.join(host)

    def lost_its_program(self, host: str) -> None:
        self.lab.kill(host, "trainer")

    def paused(self, host: str) -> None:
        self.lab.pause(host, self.dice.choice(["agent", "both"]))  # type: ignore[arg-type]
        time.sleep(self.dice.uniform(0.05, 3.0))
        self.lab.resume(host)

    def unplugged(self, host: str) -> None:
        self.lab.link(host, self.dice.choice(["down", "unplugged"]))  # type: ignore[arg-type]
        time.sleep(self.dice.uniform(0.05, 3.0))
        self.lab.link(host, "up")

    def cut(self, host: str) -> None:
        """From all others, or with another one; then nothing else happens: of fewer than half comes an alarm (R22)."""
        other = self.dice.choice(self.drill.stage.names) if self.alone else host
        self.lab.cut(",".join({host, other}))
        time.sleep(self.dice.uniform(0.05, 3.0))
        self.lab.heal()

    def frames(self, host: str) -> None:
        kind = self.dice.choice(list(wire.FrameType))
        self.lab.lose_next(host, kind, self.dice.randint(1, 20))

    def noise(self, host: str) -> None:
        shares = dict.fromkeys(("loss", "duplicate", "corrupt", "reorder"), 0.02)
        self.lab.fault(host, **shares)
        time.sleep(self.dice.uniform(0.2, 3.0))
        self.lab.clear()

    def damaged(self, host: str) -> None:
        """All must be there: of two that differ it cannot be decided which is right."""
        self.drill.all_train(90.0)
        self.drill.damage(host, self.dice.choice(["weights", "buffers", "optimizer"]))
        self.astray.add(host)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_five_minutes() -> None:
    seed = int(os.environ.get("NICPS_SEED", time.time_ns() % 1_000_000))
    print(f"NICPS_SEED={seed}")
    dice = random.Random(seed)
    with Drill(Stage(4, keyed=True, program=RECORDING)) as drill:
        stage = drill.stage
        drill.begin()
        chaos = Chaos(drill, dice)
        faults = [chaos.killed, chaos.lost_its_program, chaos.paused, chaos.unplugged, chaos.cut]
        faults += [chaos.frames, chaos.noise, chaos.damaged]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            hosts = dice.sample(stage.names, dice.choice([1, 1, 2]))
            chaos.alone = len(hosts) == 1
            for host in hosts:
                fault = dice.choice(faults)
                print(f"{fault.__name__} {host}")
                fault(host)
            drill.all_train(90.0)
            drill.exact()
        drill.end(astray=sorted(chaos.astray), forgotten=True)
