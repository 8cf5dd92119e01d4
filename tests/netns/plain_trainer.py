# SPDX-License-Identifier: Apache-2.0
"""A training program of Python's standard library alone, which records no more than docs/socket.md demands.

It trains the job of `tests/netns/members.py` with a gradient of its own making: the weights themselves, so that they
fall towards zero. It computes in float64 and rounds to float32, by operations that all processors do alike.
"""

import array
import hashlib
import json
import os
import socket
import struct
import sys
import zipfile
from pathlib import Path


class Agent:
    """The agent's socket: a message goes out, one comes back."""

    def __init__(self):
        self.socket = socket.socket(fileno=int(os.environ["NICPS_SOCKET"].removeprefix("fd:")))

    def ask(self, op, **values):
        body = json.dumps({"op": op, **values}).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)
        answer = json.loads(self.read(*struct.unpack(">I", self.read(4))))
        if answer["op"] == "error":
            sys.exit(answer["message"])
        return answer

    def read(self, size):
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                sys.exit("the agent has gone")
            data += part
        return data


def npy(data):
    """The numbers of a float32 .npy file (version 1)."""
    (header,) = struct.unpack("<H", data[8:10])
    return array.array("f", data[10 + header :])


def digest(weights):
    return hashlib.sha256(b"".join(values.tobytes() for values in weights.values())).hexdigest()


def main(row_lacks):
    agent = Agent()
    welcome = agent.ask("attach", form="json", version=1)
    folder, me = Path(welcome["workdir"]), welcome["number"]
    prepared = json.loads((folder / "prepared.json").read_text())
    layout = prepared["model"]
    with zipfile.ZipFile(folder / "model.npz") as archive:
        weights = {entry["name"]: npy(archive.read(f"{entry['name']}.npy")) for entry in layout}
    shapes = {entry["name"]: entry["shape"] for entry in layout}
    parameters = [{"name": name, "shape": shape} for name, shape in shapes.items()]
    agent.ask("ready", parameters=parameters, digest=digest(weights))
    trained, rows = 0, []
    while (phase := agent.ask("next"))["kind"] != "end":
        round_, share = phase["first_round"], phase["shares"][me - 1]
        if phase["kind"] == "test":
            agent.ask("tally", round=round_, succeeded=share, failed=0)
            agent.ask("decide", round=round_, what="end")
            rows.append({"round": round_, "weights_sha256": digest(weights)})
            continue
        while True:
            agent.ask("progress", round=round_, samples=share)
            gradient = [
                {
                    "name": name,
                    "shape": shapes[name],
                    "dtype": "float32",
                    "values": [share * value for value in values],
                }
                for name, values in weights.items()
            ]
            form = {"format": "nicps-gradient", "version": 1, "samples": share}
            agent.ask("contribute", round=round_, gradient={**form, "parameters": gradient})
            commit = agent.ask("wait", round=round_)
            if commit["op"] == "discarded":
                break
            trained += 1
            for entry in commit["gradient"]["parameters"]:
                step = 0.125 / commit["samples"]
                own = weights[entry["name"]]
                moved = (w - step * g for w, g in zip(own, entry["values"], strict=True))
                weights[entry["name"]] = array.array("f", moved)
            agent.ask("applied", round=round_, digest=digest(weights))
            last = trained >= prepared["settings"]["rounds"]
            agent.ask("decide", round=round_, what="test" if last else "continue")
            rows.append({"round": round_, "weights_sha256": digest(weights)})
            if last and commit["lead"]:
                break
            round_ += 1
    for row in rows[-1:]:  # none, if it has trained no round
        for key in row_lacks:
            del row[key]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "out" / "metrics.jsonl").write_text(lines)


main(sys.argv[1:])
