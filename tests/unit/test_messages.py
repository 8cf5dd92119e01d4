# SPDX-License-Identifier: Apache-2.0
"""The messages of the agent's socket: each as it is defined, and whatever else is sent."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nicps.errors import Alarm, MessageError, UsageProblem
from nicps.session import events, json_form, messages, shared_form, store_form
from nicps.session.fields import Conversation, Row, codec, encode
from nicps.session.messages import decode_command

VIEW = {"view": 2, "live": [1, 3], "lead": False}
HOST = {"name": "h2", "mac": "02:00:00:00:00:02", "answers": 3, "trains": [None]}
STATUS = {
    "op": "status",
    "network": "nicps",
    "name": "h1",
    "iface": "eth1",
    "keyed": False,
    "xdp_mode": "native",
    "state": "member",
    "trouble": "",
    "switch": "",
    "other_job": "",
    "warning": "",
    "phase": "train",
    "view": 1,
    "round": 7,
    "number": 1,
    "lead": 1,
    "job": "digits-1",
    "progress": {"loss": 0.5},
    "members": [{"number": 1, "mac": "02:0a", "name": "h1", "state": "sent", "self": True}],
    "last_job": {"job_id": "digits-0", "error": None, "result": {"hosts": 2}},
    "token_turns": 9,
    "fragments_sent": 8,
    "frames_malformed": 0,
    "control_refused": {},
    "counters": {"added": 3},
}
PROBE = {
    "op": "probe",
    "name": "h1",
    "iface": "eth1",
    "destination": "ff",
    "questions": 40,
    "trains": [{"rate_bps": None, "sent": 100, "offered_bps": 1e9}],
    "hosts": [
        HOST | {"round_trip_us": None},
        HOST
        | {
            "round_trip_us": {"min": 1.0, "median": 2.0, "max": 3.5},
            "trains": [{"received": 99, "rate_bps": 5e8}],
        },
    ],
}


def event(name: str, **more: Any) -> dict[str, Any]:
    return {"op": "event", "event": name, "job_id": "digits-1", **more}


def message(op: str, **more: Any) -> dict[str, Any]:
    return {"op": op, **more}


#: One of every class, with all its keys.
ASK = message("ask", number=1, what="set", keys=["k"], values=["dg=="])

WHOLE: list[tuple[Conversation[Any], list[dict[str, Any]]]] = [
    (
        messages.COMMANDS,
        [
            message("status"),
            message("watch"),
            message("submit", job="/j", data="/d", settings={"a": 1}, resume="/r", entry="trainer"),
            message("probe", seconds=0.5),
            message("cancel"),
            message("leave"),
            message("attach", form="json", pid=7),
            message("group", name="default", size=3, timeout_s=30.0),
        ],
    ),
    (
        messages.ANSWERS,
        [
            message("ok"),
            message("error", message="no", exit_code=4),
            message("result", result={"job_id": "digits-1"}),
            STATUS,
            PROBE,
            event("preparing", job="/home/ann/digits"),
            event("forming", data=None),
            event("formed", members=["h1", "h2"], view=1),
            event("handed out", bytes=10, seconds=0.5),
            event("training", exchange="stripes", exchange_reason="no switch is heard"),
            event("taking back", members=["h2"]),
            event("progress", loss=0.5, round=7, token_turns=4),
            event("warning", message="slow"),
            event("launched", hosts=["h1", "h2"]),
            event("output", host="h1", text="epoch 1\n"),
            event("output", host="h1", text="no data\n", stream="stderr"),
        ],
    ),
    (
        json_form.REQUESTS,
        [
            message("ready", parameters=[{"name": "w", "shape": [2, 3]}], digest="d"),
            message("next"),
            message("progress", round=7, samples=12),
            message("contribute", round=7, gradient={"format": "nicps-gradient"}),
            message("wait", round=7),
            message("applied", round=7, digest="d"),
            message("saved", number=5, round=40, digest="d", error="the disk is full"),
            message("loaded", number=5, digest="d"),
            message("checkpoint", round=40),
            message("tally", round=8, succeeded=86, failed=4),
            message("decide", round=8, what="continue"),
            message("report", values={"loss": 0.31}),
            message("alive"),
            message("fail", message="the disk is full"),
        ],
    ),
    (
        json_form.REPLIES,
        [
            message("ok"),
            message("error", message="no", exit_code=5),
            message(
                "welcome",
                version=1,
                number=4,
                members=4,
                name="h4",
                view=1,
                lead=False,
                settings={},
                workdir="/w",
            ),
            message("phase", kind="train", first_round=7, number=3, shares=[32, 0], **VIEW),
            message("state", round=7, need=None, closed=False),
            message("committed", round=7, samples=9, counted={"1": 9}, gradient={}, **VIEW),
            message("discarded", round=7),
            message("tallied", round=8, succeeded=345, failed=14, **VIEW),
        ],
    ),
    (
        shared_form.FROM_PROGRAM,
        [
            message("ready", lanes=4810, digest="d"),
            message("prepared", number=3),
            message("progress", round=7, samples=12),
            message("offer", round=7, samples=12, unit=None, skip=False, conversion=9),
            message("read", round=7, digest=""),
            message("saved", number=1 << 30, round=40, digest="d", error="no"),
            message("loaded", number=1 << 30, digest="d"),
            message("checkpoint", round=40, error="no"),
            message("residual", error="no"),
            message("decide", round=7, what="continue", checkpoint=True),
            message("report", values={}),
            message("alive"),
            message("fail", message="no"),
            message("step", round=7, samples=12, skip=True),
            message("pull", round=7),
        ],
    ),
    (
        shared_form.FROM_AGENT,
        [
            message("error", message="no", exit_code=4),
            message(
                "welcome",
                number=1,
                members=[{"number": 1, "name": "h1"}],
                name="h1",
                lead=1,
                settings={},
                workdir="/w",
                view=1,
            ),
            message("store"),
            message("arena", fragments=6),
            message("direct", share=0.9),
            message(
                "phase",
                kind="test",
                first_round=8,
                number=4,
                unit=-20,
                shares=[1, 1],
                exchange="switch",
                blocks=3,
                room=6,
                places=2,
                view=2,
                live=[1, 2],
                lead=1,
            ),
            message("view", view=2, live=[1], lead=1, round=8, places=2),
            message(
                "committed",
                round=7,
                counted={"1": 12},
                unit=-20,
                next_unit=-19,
                exchange="stripes",
                seconds_waited=0.25,
                view=2,
                aggregators=[1, 3],
            ),
            message("keep"),
            message("abort", message="it was stopped"),
            message("late", members=3),
            message(
                "serves",
                servers=[1, 2],
                every=64,
                sets=5,
                room=12,
                pushes=6,
                first=720,
                lanes=700,
            ),
            message("stepped", round=7, number=9, version=5, staleness=[1, 2]),
            message("pulled", round=7, number=10, first=720, lanes=700),
            message("near_limit", index=9, value=-4194303.5),
        ],
    ),
    (
        store_form.FROM_USER,
        [
            ASK,
            message("ask", number=2, what="add", keys=["k"], amount=-3),
            message("forget", number=1),
        ],
    ),
    (
        store_form.TO_USER,
        [
            message("answer", number=1, values=["dg=="], amount=1, error="no"),
            message("error", message="no", exit_code=4),
        ],
    ),
    (
        store_form.LINES,
        [
            message("base", base=3),
            message("begin"),
            message("value", key="k", value="dg=="),
            message("last", member=2, answer=message("answer", number=1, amount=5)),
            message("whole"),
            message("do", member=1, ask=ASK),
            ASK,
        ],
    ),
]


@pytest.mark.parametrize(("conversation", "sent"), WHOLE)
def test_every_message_is_read_and_written_as_it_is(
    conversation: Conversation[Any], sent: list[dict[str, Any]]
) -> None:
    read = [conversation.decode(json.loads(json.dumps(raw))) for raw in sent]
    assert [encode(found) for found in read] == sent
    assert {type(found) for found in read} == set(conversation.classes)


@pytest.mark.parametrize(("conversation", "sent"), WHOLE)
def test_a_key_that_is_missing_is_named_with_its_message(
    conversation: Conversation[Any], sent: list[dict[str, Any]]
) -> None:
    for raw in sent:
        rows = codec(type(conversation.decode(raw))).rows
        for key in raw.keys() - {"op", "event"}:
            row = next((row for row in rows if row.key == key), None)
            short = {k: v for k, v in raw.items() if k != key}
            if row is None:  # one of a report's values
                conversation.decode(short)
            elif _has_default(row):
                assert encode(conversation.decode(short)) == short
            else:
                with pytest.raises(MessageError, match=f'^{raw["op"]}: "{key}" is missing; it'):
                    conversation.decode(short)


def _has_default(row: Row) -> bool:
    return row.default is not MISSING


@pytest.mark.parametrize(("conversation", "sent"), WHOLE)
def test_keys_that_nobody_knows_are_ignored(
    conversation: Conversation[Any], sent: list[dict[str, Any]]
) -> None:
    for raw in sent:
        if raw.get("event") != "progress":  # that has what a training program reports
            assert conversation.decode({**raw, "later": [1]}) == conversation.decode(raw)


WRONG = [
    ({}, 'the message\'s "op" is missing; the agent knows status, watch, submit, probe'),
    ({"op": 3}, 'the message\'s "op" is 3, not a text; the agent knows'),
    ({"op": [[1]]}, 'the message\'s "op" is a list, not a text; the agent knows'),
    ({"op": "dance"}, "the agent knows no 'dance'; the agent knows status,"),
    ({"op": "submit"}, 'submit: "job" is missing; it must be a path'),
    ({"op": "submit", "job": None}, 'submit: "job" is None, not a path'),
    ({"op": "submit", "job": "/a\0b"}, r"""submit: "job" is '/a\x00b', not a path"""),
    ({"op": "submit", "job": "/a", "data": 3}, 'submit: "data" is 3, not a path'),
    ({"op": "submit", "job": "/a", "settings": []}, 'submit: "settings" is a list, not an object'),
    ({"op": "submit", "job": "/a", "entry": {}}, 'submit: "entry" is an object, not a text'),
    ({"op": "probe", "seconds": 0}, 'probe: "seconds" is 0, not a number from 0.05 to 3'),
    ({"op": "probe", "seconds": True}, 'probe: "seconds" is True, not a number from 0.05 to 3'),
    ({"op": "attach", "form": "xml"}, """attach: "form" is 'xml', not "shared" or "json\""""),
    ({"op": "status", "version": 2}, "version 2 of the socket's messages is unknown; this nicps"),
    ({"op": "status", "version": True}, "version True of the socket's messages is unknown"),
    ({"op": "status", "version": {}}, "version of that form of the socket's messages is unknown"),
]


@pytest.mark.parametrize(("raw", "said"), WRONG, ids=range(len(WRONG)))
def test_a_command_that_is_wrong(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(MessageError) as error:
        decode_command(raw)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value) and error.value.exit_code == UsageProblem.exit_code


OF_A_PROGRAM = [
    (message("offer", round=1, samples=0, unit=0, skip=False), '"samples" is 0, not a whole numb'),
    (message("offer", round=1, samples=1, unit=127, skip=False), '"unit" is 127, not a whole num'),
    (message("offer", round=1, samples=1, unit=0, skip=1), '"skip" is 1, not true or false'),
    (message("progress", round=-1, samples=0), '"round" is -1, not a whole number from 0 to 2^31'),
    (message("progress", round=1 << 31, samples=0), '"round" is 2147483648, not a whole number'),
    (message("progress", round=1.0, samples=0), '"round" is 1.0, not a whole number'),
    (message("read", round=1, digest="d" * 129), '"digest" has 129 characters, not at most 128'),
    (
        message("decide", round=1, what="stop"),
        """"what" is 'stop', not "continue", "test", "end", "more", "admit" or""",
    ),
    (message("report", values=[1]), '"values" is a list, not an object'),
    (message("step", round=1, samples=0), '"samples" is 0, not a whole number from 1 to 2^31 - 1'),
    (message("pull", round=-1), '"round" is -1, not a whole number from 0 to 2^31 - 1'),
]


@pytest.mark.parametrize(("raw", "said"), OF_A_PROGRAM, ids=range(len(OF_A_PROGRAM)))
def test_what_a_training_program_says_has_limits(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(MessageError, match="^" + re.escape(f"{raw['op']}: {said}")):
        shared_form.FROM_PROGRAM.decode(raw)


def test_an_entry_of_a_list_is_named() -> None:
    raw = message("ready", digest="d", parameters=[{"name": "w", "shape": [2]}, {"name": 3}])
    with pytest.raises(MessageError, match=r'^ready: "parameters", entry 2: "name" is 3, not a te'):
        json_form.REQUESTS.decode(raw)
    raw["parameters"][1] = {"name": "b", "shape": [1, -1]}
    with pytest.raises(MessageError, match=r'entry 2: "shape", entry 2 is -1, not a whole number'):
        json_form.REQUESTS.decode(raw)


def test_an_event_that_is_not_known_is_told_from_one_that_is_wrong() -> None:
    assert messages.ANSWERS.find(event("dancing")) is None
    with pytest.raises(MessageError, match=r'^event: "view" is missing'):
        messages.ANSWERS.decode(event("formed", members=[]))


def test_a_report_does_not_choose_the_keys_of_its_event() -> None:
    values = {"op": "error", "event": "warning", "job_id": "x", "token_turns": "many", "loss": 1}
    sent = encode(events.Progressed("digits-1", values, 3))
    assert sent == event("progress", loss=1, token_turns=3)


def test_an_error_is_the_same_at_the_other_end() -> None:
    told = messages.ANSWERS.decode(encode(messages.Error.of(Alarm("too few are left"))))
    assert isinstance(told, messages.Error)
    assert type(told.error) is Alarm and str(told.error) == "too few are left"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # other tests run beside it
@pytest.mark.parametrize(("conversation", "sent"), WHOLE)
def test_whatever_comes_is_a_message_or_one_error(
    conversation: Conversation[Any], sent: list[dict[str, Any]], data: Any
) -> None:
    """Any value in the place of any other."""
    raw = dict(data.draw(st.sampled_from(sent)))
    for key in data.draw(st.lists(st.sampled_from(sorted(raw)), max_size=3)):
        raw[key] = data.draw(JSON)
    try:
        found = conversation.decode(raw)
    except MessageError as error:
        said = str(error)
    else:
        assert conversation.decode(encode(found)) == found
        said = ""
    assert "\n" not in said


# ---- documents and examples


def examples(page: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines of a conversation: `->` to the agent, `<-` from it."""
    for direction, text in re.findall(r"^(->|<-) (\{.*\})$", page.read_text(), re.MULTILINE):
        yield direction, json.loads(text)


def test_the_examples_of_the_document_are_messages(checkout: Path) -> None:
    found = list(examples(checkout / "docs" / "socket.md"))
    assert len(found) >= 10
    for direction, raw in found:
        known: tuple[Conversation[Any], ...] = (messages.ANSWERS, json_form.REPLIES)
        if direction == "->":
            known = (messages.COMMANDS, json_form.REQUESTS)
        (of, *_) = [conversation for conversation in known if conversation.find(raw)]
        assert set(raw) - {"version"} <= set(encode(of.decode(raw))), raw


def test_the_numpy_program_says_what_is_defined(checkout: Path) -> None:
    """It imports nothing of nicps: its words are read in its text."""
    text = (checkout / "docs" / "examples" / "mlp" / "numpy_trainer.py").read_text()
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "ask"
    ]
    said = set()
    for call in calls:
        (op,) = (argument.value for argument in call.args)  # type: ignore[attr-defined]
        given = {keyword.arg for keyword in call.keywords}
        cls = json_form.Attach if op == "attach" else json_form.REQUESTS.find({"op": op})
        assert cls is not None, op
        rows = codec(cls).rows
        demanded = {row.key for row in rows if not _has_default(row)}
        assert demanded <= given <= {row.key for row in rows}, op
        said.add(op)
    assert said == {cls.op for cls in json_form.ANSWERS} - {"report", "alive"}
