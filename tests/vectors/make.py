# SPDX-License-Identifier: Apache-2.0
"""Writes the vectors from `frames.py`, `exchange_frames.py` and `scenarios/`.

python -m tests.vectors.make            # write frames.json, and the sequences in each folder
python -m tests.vectors.make --check    # exit 1 and name each file that differs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vectors import encode, exchange_frames, frames
from tests.vectors.scenario import Written
from tests.vectors.scenarios import (
    adding,
    averaging,
    passing,
    pulling,
    pushing,
    refusing,
    serving_refused,
    signing,
    striped_members,
    striped_refused,
    striped_sums,
    summing,
    switch_refused,
    switch_sums,
)

HERE = Path(__file__).resolve().parent
SPDX = "SPDX-License-Identifier: Apache-2.0"
#: Scenarios by the folder of their files.
FOLDERS: dict[str, tuple[Callable[[], Written], ...]] = {
    "sequences": tuple(
        make for room in (adding, summing, refusing, passing, signing) for make in room.SCENARIOS
    ),
    "servers": tuple(
        make for room in (pushing, pulling, averaging, serving_refused) for make in room.SCENARIOS
    ),
    "stripes": tuple(
        make for room in (striped_sums, striped_members, striped_refused) for make in room.SCENARIOS
    ),
    "linux_switch": (*switch_sums.SCENARIOS, *switch_refused.SCENARIOS),
}


def _part(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    data = encode.struct_bytes(name, fields)
    shown = {
        field: value.hex() if isinstance(value, bytes) else value
        for field, value in encode.with_defaults(name, fields).items()
    }
    return {"struct": name, "hex": data.hex(), "fields": shown}


def frames_json() -> dict[str, Any]:
    """`frames.json`: each frame as its structs, hex beside fields, and its tail."""
    out = []
    for vector in (*frames.FRAMES, *exchange_frames.FRAMES):
        body = b"".join(encode.struct_bytes(*struct) for struct in vector.structs) + vector.tail
        header = {"version": 1, "type": encode.TYPES.index(vector.structs[0][0])}
        header |= {"length": 32 + len(body)} | vector.header
        parts = [_part("header", header), *(_part(*struct) for struct in vector.structs)]
        out.append({"name": vector.name, "parts": parts, "tail": encode.to_text(vector.tail)})
    refused = [{"name": name, "hex": data.hex()} for name, data in frames.REFUSED]
    return {"license": SPDX, "frames": out, "refused": refused}


def dump(value: Any, indent: str = "") -> str:
    """JSON for people: lists of objects, and the objects that tell a story, take a line an item."""
    deeper = indent + " "
    if isinstance(value, dict) and (not indent or {"say", "parts", "windows"} & set(value)):
        items = [f"{deeper}{json.dumps(key)}: {dump(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        items = [deeper + dump(item, deeper) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def outputs() -> dict[Path, str]:
    """Every file and what it must hold."""
    files = {HERE / "frames.json": dump(frames_json()) + "\n"}
    for folder, make in ((folder, make) for folder, all_ in FOLDERS.items() for make in all_):
        scenario = make()
        path = HERE / folder / f"{scenario.name}.json"
        assert path not in files, f"two scenarios are called {scenario.name}"
        files[path] = dump({"license": SPDX, **scenario.as_json()}) + "\n"
    return files


def drifted() -> list[Path]:
    """Files that are missing, differ, or that nothing makes any more."""
    made = outputs()
    stale = [p for p, text in made.items() if not p.is_file() or p.read_text("utf-8") != text]
    there = {path for folder in FOLDERS for path in (HERE / folder).glob("*.json")}
    return stale + sorted(there - set(made))


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    stale, made = drifted(), outputs()
    for path in stale:
        print(path.relative_to(HERE))
        if "--check" not in arguments:
            path.write_text(made[path], "utf-8") if path in made else path.unlink()
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
