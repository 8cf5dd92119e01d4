# SPDX-License-Identifier: Apache-2.0
"""What `nicps status` prints for people."""

from __future__ import annotations

from typing import Any

from nicps.cli.status import text
from nicps.session.messages import ANSWERS, Status

MEMBERS = [
    {"number": n, "name": f"h{n}", "mac": f"02:00:0a:4d:00:0{n}", "state": "train", "self": n == 2}
    for n in (1, 2, 3)
]


def status(**more: Any) -> Status:
    """Of a host in training."""
    raw = {
        "op": "status",
        "network": "nicps",
        "name": "h2",
        "iface": "eth1",
        "xdp_mode": "native",
        "keyed": True,
        "state": "member",
        "phase": "train",
        "trouble": "",
        "switch": "",
        "other_job": "",
        "warning": "",
        "view": 3,
        "lead": 1,
        "round": 12,
        "job": "run",
        "progress": {},
        "last_job": {},
        "members": MEMBERS,
        "number": 2,
        **dict.fromkeys(("token_turns", "fragments_sent", "frames_malformed"), 0),
        "control_refused": {},
        "counters": {},
        **more,
    }
    found = ANSWERS.decode(raw)
    assert isinstance(found, Status)
    return found


def test_a_host_that_stands_by_says_why() -> None:
    lines = text(status(trouble="h1 cannot be heard")).splitlines()
    assert "trouble    h1 cannot be heard" in lines
    assert "trouble" not in text(status())


def activity(**more: Any) -> dict[str, Any]:
    """What a host does, with nothing counted."""
    numbers = dict.fromkeys(("rounds", "tests", "samples", "views", "evictions", "returns"), 0)
    numbers |= dict.fromkeys(("frames_sent", "fragments_resent", "fragments_asked"), 0)
    return {
        **numbers,
        "uptime_s": 1,
        "exchange": "",
        "lane": "",
        "parked": False,
        "members": [],
        "round_seconds": {"bounds": [], "counts": [], "sum": 0},
        "traffic": None,
        "preparing": "",
        **more,
    }


def test_a_job_that_is_being_prepared() -> None:
    prepares = activity(preparing="/home/ann/digits")
    lines = text(status(job=None, activity=prepares)).splitlines()
    assert "preparing  /home/ann/digits" in lines
    assert "preparing" not in text(status())


def test_a_host_without_a_part_in_the_job_says_which_one_runs() -> None:
    alone = status(job=None, other_job="run-2", members=[])
    line = "other job  run-2: without this host, which takes part in the next"
    assert line in text(alone).splitlines()
    assert "other job" not in text(status())


def test_a_host_that_works_may_have_a_warning() -> None:
    assert "warning    is the key the same?" in text(status(warning="is the key the same?"))
    assert "warning" not in text(status())


def test_what_is_known_of_a_switch_that_adds() -> None:
    assert "switch     adds" in text(status(switch="adds")).splitlines()
    assert "switch " not in text(status())


def test_who_leads() -> None:
    lines = text(status()).splitlines()
    assert lines[-3].endswith("train  (lead)")
    assert lines[-2].endswith("train  (this host)")
    assert text(status(lead=2)).splitlines()[-2].endswith("train  (this host, lead)")
    assert "lead" not in text(status(state="standby"))


def test_who_serves_and_who_is_evicted() -> None:
    served = [
        {**member, **more}
        for member, more in zip(
            MEMBERS, ({"role": "server"}, {"role": "worker"}, {"state": "left"}), strict=True
        )
    ]
    lines = text(status(members=served)).splitlines()
    assert lines[-3].endswith("train  (lead, server)")
    assert lines[-2].endswith("train  (this host, worker)")
    assert lines[-1].endswith("  evicted")


def test_the_rounds_of_the_network_and_of_training() -> None:
    lines = text(status(round=36, progress={"round": 35, "trained_rounds": 33})).splitlines()
    assert "open round 36" in lines and "progress   training round 33" in lines


def test_a_job_that_was_refused_has_no_name() -> None:
    lines = text(status(job=None, last_job={"job_id": "", "error": "no", "result": {}}))
    assert "last job   was refused: no" in lines.splitlines()


def test_whether_there_is_a_key() -> None:
    assert "key        yes" in text(status()).splitlines()
    assert "key        no: every host on this LAN is trusted" in text(status(keyed=False))


def test_a_job_without_a_test_has_no_accuracy() -> None:
    def last(**result: Any) -> str:
        job = {"job_id": "run-1", "error": None, "result": result}
        return text(status(job=None, last_job=job))

    assert "last job   run-1: test accuracy 0.5" in last(test_accuracy=0.5).splitlines()
    assert "last job   run-1: done" in last(test_accuracy=None).splitlines()


def test_slow_hosts_are_named() -> None:
    """Also a Linux switch, which is no member."""
    base = activity(uptime_s=9, exchange="linux-switch", lane="i16", switch_asked=1200)

    def slow(*found: tuple[int, float, str]) -> list[str]:
        rows = [{"number": n, "part": part, "what": what} for n, part, what in found]
        lines = text(status(activity=base | {"slow": rows})).splitlines()
        return [line for line in lines if line.startswith("slow ")]

    assert slow() == []
    assert slow((3, 0.414, "gradient")) == [
        "slow       h3: training waits 41% of the time for its gradient"
    ]
    assert slow((3, 0.5, "mark"), (0, 0.25, "sums")) == [
        "slow       h3: training waits 50% of the time until it has all sums;"
        " the Linux switch: training waits 25% of the time for its sums, 1,200 sums asked for again"
    ]


def test_the_exchange_of_a_job_that_trains() -> None:
    """`switch` alone says what the switch could do: a job may have another exchange."""
    does = activity(exchange="stripes", lane="i16")
    said = text(status(switch="ready", activity=does)).splitlines()
    at = said.index("exchange   stripes, lanes i16")
    assert said[at - 1] == "job        run" and "switch     ready" in said
    handed_out = status(phase="handout", activity=activity(exchange="broadcast"))
    assert "exchange " not in text(handed_out) and "exchange " not in text(status())
