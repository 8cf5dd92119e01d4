# SPDX-License-Identifier: Apache-2.0
"""The trainer's loop around a model of NumPy. With a folder its session records there (`recording`).

    python -P light_trainer.py [FOLDER]

PyTorch's import alone costs more processor time than most scenes, and is not what they test. All other parts are the
trainer's own: its loop, its states and checkpoints, its metrics. The model has the tensors of the job's, as they were
handed out. Each of its lanes is drawn, with momentum, to the mean of one column of the field "x" (samples, columns);
the averaged buffers follow the same means. The settings hold; the job's functions are not called.

The job's hooks.py may define these functions, and finds os, time, `host()` and `found(type's name)`:

    before_batch()   before every micro-batch
    before_test()    before every batch of a test
    before_load()    before another member's state is taken over
    factor()         what the gradient of this micro-batch is multiplied by
    done(state)      as a job has it
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads take as long as the rest of NumPy
import numpy as np

from nicps.client import Session
from nicps.startup import leave
from tests.netns.recording import Recording
from trainer import weights
from trainer.errors import JobError, print_cause
from trainer.loop import Loop
from trainer.prepare import unpack
from trainer.records import Records
from trainer.settings import Settings, State, merge
from trainer.state import Array
from trainer.training import Training


class Model:
    """Tensors in flat storage, as `trainer.flat.FlatModel` has them."""

    def __init__(self, layout: weights.Layout, arrays: weights.Arrays) -> None:
        self.layout = layout
        self.lanes = weights.lanes(layout)
        self.vector = np.zeros(self.lanes, np.float32)
        self._weights = np.empty(self.lanes, np.float32)
        self._tensors: dict[str, Array] = {}
        self._fixed = [entry["name"] for entry in layout if entry["kind"] == "fixed"]
        first = parameters = 0
        for entry in layout:
            name, size = entry["name"], weights.size(entry)
            if entry["kind"] == "fixed":
                self._tensors[name] = np.array(arrays[name])
                continue
            self._tensors[name] = self._weights[first : first + size].reshape(entry["shape"])
            first += size
            parameters += size * (entry["kind"] == "parameter")
        self.parameters, self.buffers = np.split(self._weights, [parameters])
        self.trained = self.parameters
        self.gradient, self._change = np.split(self.vector, [parameters])
        self.load(arrays)

    def load(self, arrays: weights.Arrays) -> None:
        weights.check(self.layout, arrays)
        for name, tensor in self._tensors.items():
            tensor[...] = arrays[name]
        self._common = self.buffers.copy()

    def begin_training(self, seed: int) -> None:
        self.vector[:] = 0
        self.restore()

    def finish(self, samples: int) -> Array:
        self._change[:] = (self.buffers - self._common) * samples
        return self.vector

    def apply(self, total: Array, samples: int) -> None:
        total /= samples
        self.gradient[:] = total[: len(self.gradient)]
        self._common += total[len(self.gradient) :]
        self.restore()

    @property
    def weights(self) -> Array:
        return self._weights

    def adopt(self) -> None:
        self._common[:] = self.buffers

    def restore(self) -> None:
        self.buffers[:] = self._common

    def changed_buffers(self) -> frozenset[str]:
        return weights.averaged(self.layout)

    def parts(self) -> Iterator[memoryview]:
        yield self._weights.data.cast("B")
        for name in self._fixed:
            yield np.ascontiguousarray(self._tensors[name]).data.cast("B")

    def sha256(self) -> str:
        sha = hashlib.sha256()
        for part in self.parts():
            sha.update(part)
        return sha.hexdigest()

    def arrays(self) -> dict[str, Array]:
        return self._tensors

    @staticmethod
    def tensor(array: Array) -> Array:
        return array

    def draw(self, x: Array, factor: float) -> float:
        """Add the gradient of these samples; their loss, a sum."""
        n, columns = x.shape
        means = np.tile(x.mean(0, dtype=np.float32), -(-self.lanes // columns))[: self.lanes]
        wanted, moving = np.split(means, [len(self.parameters)])
        off = self.parameters - wanted
        self.gradient += np.float32(n * factor) * off
        self.buffers += np.float32(0.1) * (moving - self.buffers)
        return float(n * np.square(off).mean())


class Momentum:
    """Stochastic gradient descent with momentum: the form of its state is PyTorch's."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._velocity = np.zeros_like(model.parameters)

    def step(self) -> None:
        self._velocity *= np.float32(0.9)
        self._velocity += self._model.gradient
        self._model.parameters -= np.float32(0.05) * self._velocity

    def state_dict(self) -> dict[str, Any]:
        group = {"lr": 0.05, "momentum": 0.9, "params": [0]}
        return {"state": {0: {"momentum_buffer": self._velocity}}, "param_groups": [group]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._velocity[:] = state["state"][0]["momentum_buffer"]


class Job:
    """The methods of a job that `Training` calls."""

    scheduler = staticmethod(lambda *_: None)
    blame = staticmethod(lambda *_: contextlib.nullcontext())

    def __init__(self, name: str, settings: Settings, hooks: dict[str, Any], model: Model) -> None:
        self.name, self.settings, self._hooks = name, settings, hooks
        self._model = model

    def call(self, hook: str, *arguments: Any, otherwise: Any = None) -> Any:
        """The hook's result, or `otherwise` if the job has no such hook."""
        return self._hooks[hook](*arguments) if hook in self._hooks else otherwise

    def optimizer(self, parameters: Array) -> Momentum:
        return Momentum(self._model)

    def done(self, state: State, records: int) -> bool:
        planned = self.settings.planned_rounds(records)
        return (planned is not None and state.round >= planned) or bool(self.call("done", state))


class LightTraining(Training):
    """The trainer's own, which calls no function of PyTorch's or the job's."""

    def compute(
        self, batch: weights.Arrays, samples: int, between: Callable[[], None] = lambda: None
    ) -> float:
        self.job.call("before_batch")
        between()
        return self.model.draw(batch["x"], self.job.call("factor", otherwise=1.0))

    def test(self, batches: Iterable[weights.Arrays]) -> Iterator[tuple[int, int]]:
        for batch in batches:
            self.job.call("before_test")
            succeeded = int((batch["x"].sum(1) > 0).sum())
            yield succeeded, len(batch["x"]) - succeeded

    def load(self, path: Path) -> None:
        self.job.call("before_load")
        super().load(path)


def host() -> str:
    """This host's name."""
    mac = Path("/sys/class/net/eth1/address").read_text().strip()
    return f"h{int(mac[-2:], 16)}"


def found(kind: str) -> Any:
    """The one object of that type."""
    return next(thing for thing in gc.get_objects() if type(thing).__name__ == kind)


def train(session: Session, workdir: Path) -> None:
    """As `trainer.run.train` does."""
    prepared = json.loads((workdir / "prepared.json").read_text())
    unpack(workdir / "job.tar", workdir / "job")
    hooks: dict[str, Any] = {"os": os, "time": time, "host": host, "found": found}
    exec((workdir / "job" / "hooks.py").read_text(), hooks)
    model = Model(prepared["model"], weights.load(workdir / "model.npz"))
    job = Job(prepared["job"], merge(Settings(), prepared["settings"]), hooks, model)
    training = LightTraining(job, model, prepared["train"]["records"])
    if "resume" in prepared:
        training.load(workdir / "resume.npz")
    sets = (Records(workdir / f"{of}.bin", prepared[of]["fields"]) for of in ("train", "test"))
    state = Loop(session, training, *sets, workdir).run()
    final = {
        "job": job.name,
        "rounds": state.round,
        "accuracy": state.accuracy,
        "weights_sha256": model.sha256(),
        "seconds": state.seconds,
    }
    (workdir / "out" / "final.json").write_text(json.dumps(final) + "\n")


def main(folder: str = "") -> int:
    Recording.folder = Path(folder)
    session = (Recording if folder else Session).attach()
    try:
        train(session, Path.cwd())
    except JobError as error:
        print_cause(error)
        session.fail(str(error))
        return 1
    finally:
        session.close()
    return 0


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
