# SPDX-License-Identifier: Apache-2.0
"""A training program without PyTorch: job.py's model in NumPy, over JSON messages (docs/socket.md).

    nicps join --iface eth1 --trainer "python /path/to/numpy_trainer.py"

It imports nothing of nicps: another language would do the same. Its gradients are its own; only the update, made of
the sum that all members have, must be bit for bit what PyTorch makes of it.
"""

import hashlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

import numpy as np

NAMES = ("1.weight", "1.bias", "3.weight", "3.bias")


class Agent:
    """The agent's socket: a message goes out, one comes back; a big-endian u32 length, then JSON."""

    def __init__(self):
        address = os.environ["NICPS_SOCKET"]  # fd:N, a connection that we have inherited
        self.socket = socket.socket(fileno=int(address.removeprefix("fd:")))

    def ask(self, op, **values):
        body = json.dumps({"op": op, **values}).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)
        answer = json.loads(self.read(*struct.unpack(">I", self.read(4))))
        if answer["op"] == "error":
            sys.exit(answer["message"])
        return answer

    def read(self, size):
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                sys.exit("the agent has gone")
            data += part
        return bytes(data)


class Records:
    """This member's part of a data set: fixed-size records."""

    def __init__(self, path, fields):
        kinds = [
            (f["name"], np.dtype(f["dtype"]).newbyteorder("<"), tuple(f["shape"])) for f in fields
        ]
        rows = np.fromfile(path, np.dtype(kinds))
        self.images = rows["image"].reshape(len(rows), -1).astype(np.float32) / np.float32(16)
        self.labels = rows["label"].astype(np.int64)

    def __len__(self):
        return len(self.labels)


class Mlp:
    """Two layers; `weights` by name, in the order of a round's vector."""

    def __init__(self, weights):
        self.weights = weights
        self.velocity = None

    def forward(self, images):
        w1, b1, w2, b2 = (self.weights[name] for name in NAMES)
        hidden = np.maximum(images @ w1.T + b1, 0)
        return hidden, hidden @ w2.T + b2

    def gradient(self, images, labels):
        """The gradients summed (not averaged) over the samples, by name, and the sum of the losses."""
        hidden, scores = self.forward(images)
        scores -= scores.max(1, keepdims=True)
        scores = np.exp(scores)
        scores /= scores.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(scores[rows, labels]).sum()
        scores[rows, labels] -= 1
        back = (scores @ self.weights["3.weight"]) * (hidden > 0)
        found = (back.T @ images, back.sum(0), scores.T @ hidden, scores.sum(0))
        return dict(zip(NAMES, found, strict=True)), float(loss)

    def step(self, total, samples, lr, momentum):
        """torch.optim.SGD along the mean, in its order of operations, all in float32."""
        mean = {name: total[name] / np.float32(samples) for name in NAMES}
        if self.velocity is None:
            self.velocity = mean
        else:
            for name, value in self.velocity.items():
                value *= np.float32(momentum)
                value += mean[name]
        for name, value in self.weights.items():
            value -= np.float32(lr) * self.velocity[name]

    def sha256(self):
        return hashlib.sha256(b"".join(self.weights[n].tobytes() for n in NAMES)).hexdigest()


class Member:
    """One member's training, from the files that were handed out to the end."""

    def __init__(self):
        self.agent = Agent()
        self.welcome = self.agent.ask("attach", form="json", version=1)
        self.settings = self.welcome["settings"]
        folder = Path(self.welcome["workdir"])
        prepared = json.loads((folder / "prepared.json").read_text())
        self.layout = prepared["model"]
        if [entry["name"] for entry in self.layout] != list(NAMES):
            self.agent.ask(
                "fail", message="numpy_trainer.py knows the model of docs/examples/mlp only"
            )
        if self.welcome["number"] == 1:
            self.agent.ask("fail", message="numpy_trainer.py decides nothing: submit elsewhere")
        with np.load(folder / "model.npz") as arrays:
            self.model = Mlp({name: arrays[name] for name in NAMES})
        self.train = Records(folder / "train.bin", prepared["train"]["fields"])
        self.test = Records(folder / "test.bin", prepared["test"]["fields"])
        self.random = np.random.default_rng((self.settings["seed"], self.welcome["number"]))
        self.order = np.empty(0, np.int64)
        self.metrics = (folder / "out" / "metrics.jsonl").open("w")

    def run(self):
        shapes = [{"name": entry["name"], "shape": entry["shape"]} for entry in self.layout]
        # The other members' digest: of the layout as Python writes it, and of the weights.
        layout = json.dumps(self.layout, sort_keys=True)
        digest = hashlib.sha256((layout + self.model.sha256()).encode()).hexdigest()
        self.agent.ask("ready", parameters=shapes, digest=digest)
        while (phase := self.agent.ask("next"))["kind"] != "end":
            round_ = phase["first_round"]
            if phase["kind"] == "test":
                self.test_round(round_)
                continue
            while self.train_round(round_):
                round_ += 1
        self.metrics.close()

    def train_round(self, round_):
        """Compute, contribute, wait, step; False when the phase is over."""
        start = time.monotonic()
        done, loss, gradient, closed = self.compute(round_)
        offered = time.monotonic()
        own = 0 if closed else done
        if own:
            self.agent.ask("contribute", round=round_, gradient=as_json(gradient, own))
        commit = self.agent.ask("wait", round=round_)
        if commit["op"] == "discarded":
            return False
        committed = time.monotonic()
        if commit["samples"]:
            total = from_json(commit["gradient"])
            lr, momentum = self.settings["lr"], self.settings["momentum"]
            self.model.step(total, commit["samples"], lr, momentum)
        self.note(
            "train",
            round_,
            (start, offered, committed),
            loss=loss / done if done else None,
            samples=commit["samples"],
            own_samples=own,
            counted=commit["counted"],
        )
        return True

    def compute(self, round_):
        """The share of the batch in micro-batches, until it is enough for the quorum (R13)."""
        share, parts = self.welcome["share"], self.settings["micro_batches"]
        while len(self.order) < share:  # another pass over the records
            self.order = np.append(self.order, self.random.permutation(len(self.train)))
        mine, self.order = self.order[:share], self.order[share:]
        sums = {name: np.zeros_like(array) for name, array in self.model.weights.items()}
        done, loss_sum = 0, 0.0
        for part in range(1, parts + 1):
            end = share * part // parts
            if end == done:
                continue
            chosen = mine[done:end]
            found, loss = self.model.gradient(self.train.images[chosen], self.train.labels[chosen])
            for name, array in found.items():
                sums[name] += array
            loss_sum += loss
            done = end
            state = self.agent.ask("progress", round=round_, samples=done)
            if state["closed"]:
                return done, loss_sum, sums, True
            enough = state["need"] is not None and 0 < state["need"] <= done
            if self.settings["quorum"] < 1 and enough:
                break
        return done, loss_sum, sums, False

    def test_round(self, round_):
        """Test the own part; only the counts go out (R15)."""
        start = time.monotonic()
        right = self.model.forward(self.test.images)[1].argmax(1) == self.test.labels
        succeeded = int(right.sum())
        offered = time.monotonic()
        failed = len(right) - succeeded
        tally = self.agent.ask("tally", round=round_, succeeded=succeeded, failed=failed)
        whole = tally["succeeded"] + tally["failed"]
        self.note(
            "test",
            round_,
            (start, offered, time.monotonic()),
            loss=None,
            samples=whole,
            succeeded=tally["succeeded"],
            failed=tally["failed"],
            accuracy=tally["succeeded"] / max(1, whole),
        )

    def note(self, phase, round_, moments, **values):
        """A line of metrics.jsonl; the hashes are compared over all members."""
        start, offered, committed = moments
        end = time.monotonic()
        line = {
            "phase": phase,
            "round": round_,
            "view": self.welcome["view"],
            **values,
            "weights_sha256": self.model.sha256(),
            "seconds_compute": offered - start + end - committed,
            "seconds_wait": committed - offered,
            "seconds_network": 0.0,
            "t_start": start,
            "t_offer": offered,
            "t_commit": committed,
            "t_end": end,
        }
        self.metrics.write(json.dumps(line) + "\n")
        self.metrics.flush()


def as_json(gradient, samples):
    """A gradient in the form of docs/gradient-json.md."""
    parameters = [
        {
            "name": name,
            "shape": list(array.shape),
            "dtype": "float32",
            "values": array.reshape(-1).tolist(),
        }
        for name, array in gradient.items()
    ]
    return {"format": "nicps-gradient", "version": 1, "samples": samples, "parameters": parameters}


def from_json(gradient):
    """Arrays by name."""
    return {
        entry["name"]: np.array(entry["values"], np.float32).reshape(entry["shape"])
        for entry in gradient["parameters"]
    }


if __name__ == "__main__":
    Member().run()
