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
import zipfile
from pathlib import Path

import numpy as np
import xxhash

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
    """A data set, or this member's part of it: fixed-size records."""

    def __init__(self, path, fields):
        kinds = [
            (f["name"], np.dtype(f["dtype"]).newbyteorder("<"), tuple(f["shape"])) for f in fields
        ]
        rows = np.fromfile(path, np.dtype(kinds))
        self.images = rows["image"].reshape(len(rows), -1).astype(np.float32) / np.float32(16)
        self.labels = rows["label"].astype(np.int64)

    def part(self, shares, number, redeal):
        """First and last-plus-one of this member's records, dealt among those that have a share."""
        rank, count = sum(map(bool, shares[:number])), sum(map(bool, shares))
        if not shares[number - 1]:
            return 0, 0
        if not redeal:  # the others' records are not here
            return 0, len(self.labels)
        return len(self.labels) * (rank - 1) // count, len(self.labels) * rank // count


class Mlp:
    """Two layers; `weights` by name, in the order of a round's vector, and what SGD keeps: `velocity`."""

    def __init__(self, weights, lr, momentum):
        self.weights = weights
        self.lr, self.momentum = lr, momentum
        self.velocity = None
        self.trained = 0  # rounds

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

    def step(self, total, samples):
        """torch.optim.SGD along the mean, in its order of operations, all in float32."""
        mean = {name: total[name] / np.float32(samples) for name in NAMES}
        if self.velocity is None:
            self.velocity = mean
        else:
            for name, value in self.velocity.items():
                value *= np.float32(self.momentum)
                value += mean[name]
        for name, value in self.weights.items():
            value -= np.float32(self.lr) * self.velocity[name]
        self.trained += 1

    def sha256(self):
        return hashlib.sha256(b"".join(self.weights[n].tobytes() for n in NAMES)).hexdigest()

    def kept(self):
        """torch.optim.SGD's group without "params", and its state's arrays by their names in a state file."""
        group = {"dampening": 0, "lr": self.lr, "momentum": self.momentum, "weight_decay": 0}
        if self.velocity is None or not self.momentum:
            return group, {}
        names = (f"optimizer/state/{i}/momentum_buffer" for i in range(len(NAMES)))
        return group, dict(zip(names, self.velocity.values(), strict=True))

    def digest(self):
        """The state's digest, as the others make it."""
        group, arrays = self.kept()
        found = xxhash.xxh3_128(struct.pack("<q", self.trained))
        for name in NAMES:
            found.update(self.weights[name])
        found.update(struct.pack("<4d", *group.values()))
        for array in arrays.values():
            found.update(array)
        return found.hexdigest()

    def save(self, path, head):
        """Write a state file; the others' PyTorch can go on from it."""
        group, arrays = self.kept()
        group |= {"nesterov": False, "params": list(range(len(NAMES)))}
        state = [[i, as_dict(momentum_buffer={"array": n})] for i, n in enumerate(arrays)]
        optimizer = as_dict(state={"dict": state}, param_groups=[as_dict(**group)])
        head = {"format": "nicps-state", "version": 1, **head, "optimizer": optimizer}
        part = path.with_suffix(".part.npz")
        np.savez(part, **{f"model/{n}": a for n, a in self.weights.items()}, **arrays)
        with zipfile.ZipFile(part, "a") as archive:
            archive.writestr("state.json", json.dumps(head | {"scheduler": None}))
        os.replace(part, path)

    def load(self, path):
        """Go on from a state file; what state.json holds."""
        with np.load(path) as archive:
            head = json.loads(archive["state.json"])
            for name, array in self.weights.items():
                array[...] = archive[f"model/{name}"]
            buffers = [f"optimizer/state/{i}/momentum_buffer" for i in range(len(NAMES))]
            self.velocity = None
            if buffers[0] in archive.files:
                kept = [archive[buffer] for buffer in buffers]
                self.velocity = dict(zip(NAMES, kept, strict=True))
        self.trained = head["progress"]["round"]
        return head


class Member:
    """One member's training, from the files that were handed out to the end."""

    def __init__(self):
        self.agent = Agent()
        self.welcome = self.agent.ask("attach", form="json", version=1)
        self.settings = self.welcome["settings"]
        self.folder = folder = Path(self.welcome["workdir"])
        self.prepared = prepared = json.loads((folder / "prepared.json").read_text())
        self.layout = prepared["model"]
        if [entry["name"] for entry in self.layout] != list(NAMES):
            self.agent.ask(
                "fail", message="numpy_trainer.py knows the model of docs/examples/mlp only"
            )
        if self.welcome["number"] == 1:
            self.agent.ask("fail", message="numpy_trainer.py saves no model.pt: submit elsewhere")
        with np.load(folder / "model.npz") as arrays:
            lr, momentum = self.settings["lr"], self.settings["momentum"]
            self.model = Mlp({name: arrays[name] for name in NAMES}, lr, momentum)
        self.progress = dict.fromkeys(("loss", "accuracy", "best")) | {"epoch": 0.0, "seconds": 0.0}
        self.finishing, self.began, self.saved_at = False, time.monotonic(), time.monotonic()
        if "resume" in prepared:
            self.take(folder / "resume.npz")
        self.train = Records(folder / "train.bin", prepared["train"]["fields"])
        self.test = Records(folder / "test.bin", prepared["test"]["fields"])
        self.random = np.random.default_rng((self.settings["seed"], self.welcome["number"]))
        self.order, self.part = np.empty(0, np.int64), (0, 0)
        self.metrics = (folder / "out" / "metrics.jsonl").open("w")

    def run(self):
        shapes = [{"name": entry["name"], "shape": entry["shape"]} for entry in self.layout]
        # The other members' digest: of the layout as Python writes it, and of the state.
        layout = json.dumps(self.layout, sort_keys=True)
        digest = hashlib.sha256((layout + self.model.digest()).encode()).hexdigest()
        self.agent.ask("ready", parameters=shapes, digest=digest)
        kinds = {"train": self.train_phase, "test": self.test_round}
        kinds |= {"save": self.save_phase, "load": self.load_phase}
        while (phase := self.agent.ask("next"))["kind"] != "end":
            kinds[phase["kind"]](phase)
        self.metrics.close()
        final = {"accuracy": self.progress["accuracy"], "rounds": self.model.trained}
        (self.folder / "out" / "final.json").write_text(json.dumps(final))

    def dealt(self, records, phase):
        """This member's part of the records in a phase."""
        return records.part(phase["shares"], self.welcome["number"], self.settings["redeal"])

    def train_phase(self, phase):
        """Rounds until the next decision."""
        self.share, part = (
            phase["shares"][self.welcome["number"] - 1],
            self.dealt(self.train, phase),
        )
        if part != self.part:  # the data has been dealt again (R21)
            self.part, self.order = part, np.empty(0, np.int64)
        round_ = phase["first_round"]
        while self.train_round(round_):
            round_ += 1

    def save_phase(self, phase):
        """Somebody comes back, and takes our state (R20)."""
        self.save(self.folder / "state.npz")
        trained, digest = self.model.trained, self.model.digest()
        self.agent.ask("saved", number=phase["number"], round=trained, digest=digest)

    def load_phase(self, phase):
        """We come back, and take theirs."""
        self.take(self.folder / "state.npz")
        self.agent.ask("loaded", number=phase["number"], digest=self.model.digest())

    def save(self, path):
        """Write all that another member needs."""
        self.progress["seconds"] = time.monotonic() - self.began
        head = {"job": self.prepared["job"], "settings": self.settings, "unit": None}
        head |= {"progress": self.progress | {"round": self.model.trained}}
        self.model.save(path, head | {"finishing": self.finishing})

    def take(self, path):
        """Go on from another member's state."""
        head = self.model.load(path)
        self.progress, self.finishing = head["progress"], head["finishing"]
        self.began = time.monotonic() - self.progress["seconds"]

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
            self.model.step(from_json(commit["gradient"]), commit["samples"])
        self.agent.ask("applied", round=round_, digest=self.model.digest())
        test = self.decide(commit)
        self.note(
            "train",
            round_,
            (start, offered, committed),
            view=commit["view"],
            loss=loss / done if done else None,
            samples=commit["samples"],
            own_samples=own,
            counted=commit["counted"],
        )
        if commit["lead"] and commit.get("checkpoint"):
            self.checkpoint()
        return not (test and commit["lead"])

    def decide(self, commit):
        """What should come next (R14): all say so, and only the lead's word counts. Whether it is a test."""
        records, batch = self.prepared["train"]["records"], self.settings["batch"]
        epochs, rounds, every = (self.settings[k] for k in ("epochs", "rounds", "test_every"))
        an_epoch = max(1, round(records / batch))
        plans = [rounds] if rounds else []
        plans += [max(1, round(epochs * an_epoch))] if epochs else []
        trained = self.model.trained
        self.progress["epoch"] = trained * batch / records
        self.finishing = trained >= min(plans)
        test = self.finishing or (commit["samples"] > 0 and trained % (every or an_epoch) == 0)
        self.judge(commit["round"], "test" if test else "continue")
        return test

    def judge(self, round_, what):
        """Say what should come next, and as the lead whether a checkpoint is due after the next round (R22)."""
        every = self.settings["checkpoint_s"]
        due = bool(every) and time.monotonic() - self.saved_at >= every
        self.agent.ask("decide", round=round_, what=what, checkpoint=due)

    def checkpoint(self):
        """As the lead, after a round of which all members were told so: a state to go on from if all is lost."""
        self.saved_at = time.monotonic()
        self.save(self.folder / "checkpoint.npz")
        self.agent.ask("checkpoint", round=self.model.trained)

    def compute(self, round_):
        """The share of the batch in micro-batches, until it is enough for the quorum (R13)."""
        share, parts = self.share, self.settings["micro_batches"]
        while len(self.order) < share:  # another pass over the records
            first, end = self.part
            self.order = np.append(self.order, first + self.random.permutation(end - first))
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

    def test_round(self, phase):
        """Test the own part; only the counts go out (R15)."""
        start, round_ = time.monotonic(), phase["first_round"]
        mine = slice(*self.dealt(self.test, phase))
        right = self.model.forward(self.test.images[mine])[1].argmax(1) == self.test.labels[mine]
        succeeded = int(right.sum())
        offered = time.monotonic()
        failed = len(right) - succeeded
        tally = self.agent.ask("tally", round=round_, succeeded=succeeded, failed=failed)
        if tally["op"] == "discarded":
            return
        whole = tally["succeeded"] + tally["failed"]
        accuracy = tally["succeeded"] / max(1, whole)
        self.progress |= {"accuracy": accuracy, "best": max(accuracy, self.progress["best"] or 0.0)}
        self.judge(round_, "end" if self.finishing else "continue")
        self.note(
            "test",
            round_,
            (start, offered, time.monotonic()),
            view=tally["view"],
            loss=None,
            samples=whole,
            succeeded=tally["succeeded"],
            failed=tally["failed"],
            accuracy=accuracy,
        )

    def note(self, phase, round_, moments, **values):
        """A line of metrics.jsonl; the hashes are compared over all members."""
        start, offered, committed = moments
        end = time.monotonic()
        line = {
            "phase": phase,
            "round": round_,
            "trained_rounds": self.model.trained,
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


def as_dict(**values):
    """A dict as state files have it."""
    return {"dict": list(values.items())}


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
