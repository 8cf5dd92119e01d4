# SPDX-License-Identifier: Apache-2.0
"""The messages of the agent's socket as tables, for docs/socket.md (`python -m nicps.wiregen` puts them there)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from nicps.errors import EnvironmentProblem
from nicps.session import json_form, messages
from nicps.session.fields import REST, Message, codec
from nicps.session.metrics import MetricsRow

_REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_HEAD = ("| message | key | holds | means |", "| --- | --- | --- | --- |")

#: The answers to commands; those that are left out are described elsewhere.
_COMMANDS: dict[type[Message], tuple[type[Message], ...]] = {
    messages.AskStatus: (messages.Status,),
    messages.Watch: (),
    messages.Submit: (),
    messages.AskProbe: (messages.Probe,),
    messages.Cancel: (messages.Ok,),
    messages.Leave: (messages.Ok,),
    messages.Attach: (),
    messages.JoinGroup: (),
}
_JSON_FORM = {
    "ready": (json_form.Attach, json_form.Ready, json_form.Next),
    "round": (json_form.Progress, json_form.Contribute, json_form.Wait, json_form.Applied),
    "state": (json_form.Saved, json_form.Loaded, json_form.Checkpoint),
    "end": (
        *(json_form.Tally, json_form.Decide, json_form.Report),
        *(json_form.Alive, json_form.Fail),
    ),
}


def tables() -> dict[str, str]:
    """All tables by name, as Markdown."""
    made = {
        "commands": _table(_requests(_COMMANDS, (messages.Probe, messages.Ok))),
        "events": _table((cls, "") for cls in messages.ANSWERS.classes if cls.event),
        "ends": _table((cls, "") for cls in (messages.Result, messages.Error)),
        "status": _fields_table(messages.Status),
        "metrics": _fields_table(MetricsRow),
    }
    for name, requests in _JSON_FORM.items():
        answers = {request: json_form.ANSWERS[request] for request in requests}
        shown = {answer for each in answers.values() for answer in each} - {messages.Ok}
        made[name] = _table(_requests(answers, tuple(shown)))
    return made


def fill(page: str) -> str:
    """A page with all its tables made anew; each stands between two comments.

    Raises:
        EnvironmentProblem: the page lacks one, or has another one.
    """
    made = tables()
    named = [name for _, name, _ in _REGION.findall(page)]
    if sorted(named) != sorted(made):
        raise EnvironmentProblem(
            f"docs/socket.md has tables {', '.join(named) or 'of no name'}; it must have {', '.join(made)}"
        )
    return _REGION.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n{found[3]}", page)


def _requests(
    answers: Mapping[type[Any], Sequence[type[Any]]], shown: Sequence[type[Any]]
) -> Iterator[tuple[type[Any], str]]:
    """Messages and what the table says of them: who asks what, and behind it the answers that are shown."""
    done: set[type[Any]] = set()
    for request, replies in answers.items():
        names = " or ".join(f"`{reply.op}`" for reply in replies)
        yield request, f"Answer: {names}." if names else ""
        for reply in replies:
            if reply in shown and reply not in done:
                done.add(reply)
                yield reply, "answer"


def _table(entries: Iterator[tuple[type[Any], str]]) -> str:
    lines = [*_HEAD]
    for cls, note in entries:
        name = f"`{cls.event or cls.op}`"
        if note == "answer":
            name, note = f"{name} (answer)", ""
        lines.append(f"| {name} | | | {' '.join(filter(None, (_doc(cls), note)))} |")
        lines += [f"| | `{key}` | {kind} | {doc} |" for key, kind, doc in _rows(cls)]
    return "\n".join(lines)


def _fields_table(cls: type[Any]) -> str:
    lines = ["| key | holds | means |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {kind} | {doc} |" for key, kind, doc in _rows(cls)]
    return "\n".join(lines)


def _rows(cls: type[Any], before: str = "") -> Iterator[tuple[str, str, str]]:
    for row in codec(cls).rows:
        kind = row.field.kind
        if kind is REST:
            yield "...", kind.text, row.field.doc
            continue
        optional = "" if row.default is MISSING else ("; may be left out")
        yield f"{before}{row.key}", f"{kind.text}{optional}", row.field.doc
        if kind.record is not None:
            several = "[]" if kind.text.startswith("a list") else ""
            yield from _rows(kind.record, f"{before}{row.key}{several}.")


def _doc(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())
