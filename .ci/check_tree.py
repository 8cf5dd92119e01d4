# SPDX-License-Identifier: Apache-2.0
"""Checks what the linters do not: an SPDX line on every file, and CHANGELOG.md against the version.

Prints one line per fault and exits 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "SPDX-License-Identifier: "
HEAD_LINES = 3

# Licence texts are themselves; JSON, captures and pictures in bitmaps have no comments.
NO_COMMENTS = {".json", ".jsonl", ".pcap", ".png", ".gz"}
NO_COMMENT_FOLDERS = ("LICENSE", "LICENSES/")


def ignored(part: str) -> bool:
    """Whether git would ignore a file with `part` in its path (where there is no git to ask)."""
    if part.startswith("."):
        return part not in {".ci", ".clang-format", ".gitignore"}
    return part in {"runs", "build", "dist", "__pycache__"} or part.endswith(".egg-info")


def tracked_files() -> list[str]:
    """The paths, from the root, of the files that git keeps; of all files where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return [str(path) for path in paths if not any(map(ignored, path.parts))]
    return [name for name in listed.split("\0") if name]


def spdx_faults(names: list[str]) -> list[str]:
    """The files without an SPDX line among their first lines."""
    faults = []
    for name in names:
        path = ROOT / name
        if name.startswith(NO_COMMENT_FOLDERS) or path.suffix in NO_COMMENTS:
            continue
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with path.open(errors="replace") as file:
            head = "".join(line for _, line in zip(range(HEAD_LINES), file, strict=False))
        if SPDX not in head:
            faults.append(f"{name}: no '{SPDX.strip()}' in its first {HEAD_LINES} lines")
    return faults


def version_faults() -> list[str]:
    """CHANGELOG.md must open with [Unreleased] or the version, and have the version's section."""
    found = re.search(r'^__version__ = "(.+)"', (ROOT / "nicps/__init__.py").read_text(), re.M)
    if found is None:
        return ["nicps/__init__.py: no __version__"]
    version = found.group(1)
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [section for section in sections if section != "Unreleased"]
    if not released or released[0] != version:
        newest = released[0] if released else "nothing"
        return [f"CHANGELOG.md: newest version is {newest}, nicps.__version__ is {version}"]
    return []


def main() -> int:
    """Print the faults; 1 if there are any."""
    faults = spdx_faults(tracked_files()) + version_faults()
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
