# SPDX-License-Identifier: Apache-2.0
"""A member of a group with several channels: `python -m tests.netns.channels_program SETTINGS`.

It prints a JSON object a line.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import orjson

from nicps.collective import CallMismatch, Group, MemberLost
from nicps.errors import NicpsError
from tests.collectives import Drawn, draw


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


class Program:
    """One member."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.group = Group.form(
            settings["size"],
            forming_s=30,
            timeout_s=30,
            late=settings.get("late", False),
            urgencies=settings.get("urgencies"),
            rooms=settings.get("rooms"),
        )
        say(formed=self.group.rank, names=self.group.names, channels=self.group.channels)

    def digest(self, call: Drawn, result: Any) -> str:
        """Check the result against NumPy; the same text at all members, where all have the same result."""
        group = self.group
        counted = [rank for rank in range(group.size) if rank not in group.lost]
        call.check(result, group.rank, counted)
        shared = call.what in ("all_reduce", "broadcast", "all_gather")
        return hashlib.sha256(result.tobytes()).hexdigest() if shared else ""

    def drawn(self) -> None:
        """Calls on all channels at once; the channels' calls are mixed otherwise at each member. Then the same ones on
        another plan, and on one channel.
        """
        group, count, most = self.group, self.settings["calls"], self.settings.get("most", 20_000)
        for urgencies in (None, [5, 0, 2], [3]):
            if urgencies is not None:
                group.plan(urgencies)
            channels = group.channels
            calls = [draw(7, number, group.size, most) for number in range(count)]
            order = [number % channels for number in range(count)]
            random.Random(group.rank).shuffle(order)
            queues = [list(range(c, count, channels)) for c in range(channels)]
            futures: dict[int, Future[Any]] = {}
            for channel in order:
                number = queues[channel].pop(0)
                futures[number] = calls[number].call(group, channel)
            digests = [self.digest(calls[k], futures[k].result()) for k in range(count)]
            say(plan=channels, digests=digests, **self.averages(channels))

    def averages(self, channels: int) -> dict[str, Any]:
        """Means in narrow lanes with error feedback, three of each vector: their bits, and those of the residuals."""
        sizes = (30_000, 700, 9000)
        residuals = [np.zeros(size, np.float32) for size in sizes]
        means = hashlib.sha256()
        for step in range(3):
            random = np.random.default_rng([self.group.rank, step])
            vectors = [random.standard_normal(size, np.float32) for size in sizes]
            futures = [
                self.group.average(vector, residual, channel=k % channels)
                for k, (vector, residual) in enumerate(zip(vectors, residuals, strict=True))
            ]
            for future in futures:
                means.update(future.result().tobytes())
        kept = hashlib.sha256(b"".join(each.tobytes() for each in residuals))
        return {"means": means.hexdigest(), "residuals": kept.hexdigest()}

    def beside(self) -> None:
        """Small urgent sums, while a large one is under way; on channels of their own, and on one."""
        group = self.group
        large, small = np.ones(self.settings["large"], np.float32), np.ones(1000, np.float32)
        for channel in (1, 0):
            group.barrier().result()
            bulk, took = group.all_reduce(large), []
            time.sleep(0.1)
            for _ in range(self.settings["urgent"]):
                began = time.monotonic()
                total = group.all_reduce(small, channel=channel).result()
                took.append((time.monotonic() - began, bulk.done()))
                assert (total == group.size).all()
                time.sleep(0.02)
            assert (bulk.result() == group.size).all()
            say(channel=channel, took=took)

    def restrained(self) -> None:
        """Small urgent sums without a pause, for as long as a large one is under way."""
        group, count = self.group, 0
        small = np.ones(9000, np.float32)
        bulk = group.all_reduce(np.ones(self.settings["large"], np.float32))
        time.sleep(0.1)
        goes_on = True
        while goes_on:
            goes_on = group.all_reduce(small, channel=1).result()[0] == group.size
            left = np.array([not bulk.done()])  # all members end with the same call
            goes_on = bool(group.all_reduce(left, "min", channel=1).result()[0])
            count += 1
        bulk.result()
        say(count=count)

    def lossy(self) -> None:
        """Sums on two channels, in which a member ends."""
        group, dies = self.group, self.settings["dies"]
        numbers = range(self.settings["calls"])
        vectors = [np.random.default_rng([group.rank, k]).normal(size=90_000) for k in numbers]
        futures = []
        for number, vector in enumerate(vectors):
            futures.append(group.all_reduce(vector.astype(np.float32), channel=number % 2))
            if group.rank == dies[0] and number == dies[1]:
                futures[number // 2].result()
                os.kill(os.getpid(), signal.SIGKILL)
        for number, future in enumerate(futures):
            try:
                total = future.result()
            except MemberLost as error:
                say(call=number, lost=str(error))
                continue
            every = [
                np.random.default_rng([k, number]).normal(size=90_000).astype(np.float32)
                for k in range(group.size)
            ]
            rest = [each for k, each in enumerate(every) if k != dies[0]]
            fits = [np.allclose(total, sum(some), atol=1e-5) for some in (every, rest)]
            assert any(fits), number
            digest = hashlib.sha256(total.tobytes()).hexdigest()
            say(call=number, whole=fits[0], digest=digest)

    def differing(self) -> None:
        """Each member asks for another plan; then all for the same, and a channel that there is not."""
        group = self.group
        try:
            group.plan([0, 1 + group.rank]).result()
        except CallMismatch as error:
            say(differs=str(error), channels=group.channels)
        group.plan([0, 1]).result()
        total = group.all_reduce(np.ones(5), channel=1).result()
        say(total=total.tolist())
        try:
            group.barrier(channel=2)
        except NicpsError as error:
            say(error=str(error))

    def admitting(self) -> None:
        """Members take another one in, and go on with it on the channels that they have."""
        group, steps = self.group, 0
        while steps < 5:
            came = group.admit().result()
            if came.ranks:
                steps = int(group.broadcast(np.array([steps]), came.sources[0]).result()[0])
            sums = [
                group.all_reduce(np.full(3000 + k, group.rank + k, np.float32), channel=k)
                for k in range(group.channels)
            ]
            found = [float(each.result()[0]) for each in sums]
            steps += group.size == 3 and not group.lost
            say(step=steps, sums=found, channels=group.channels)


def run(settings: dict[str, Any]) -> None:
    """Form, and do what the settings say."""
    program = Program(settings)
    getattr(program, settings["what"])()
    program.group.close()
    say(closed=True, lost=program.group.lost)


if __name__ == "__main__":
    try:
        run(orjson.loads(sys.argv[1]))
    except NicpsError as error:
        say(error=str(error), kind=type(error).__name__)
        sys.exit(error.exit_code)
