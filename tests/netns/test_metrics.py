# SPDX-License-Identifier: Apache-2.0
"""Agents that serve metrics, the Grafana dashboard that is made of them, and `nicps top` beside a job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from nicps.agent.families import FAMILIES, ROUND_SECONDS
from nicps.session.channel import Channel
from tests.netns.labs import ROOT, until
from tests.netns.members import LIGHT, Network, tiny_job

DASHBOARD = ROOT / "packaging" / "grafana" / "nicps.json"
SCRAPE = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9400/metrics', timeout=20).read().decode())"
#: Those of a job with `priorities`.
PLANNED = [
    family for family in FAMILIES if re.match("nicps_(channel|training_(step|wait))_", family.name)
]
#: Labels that Prometheus adds.
ITS_OWN = {"instance", "job", "le"}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts whose agents serve metrics."""
    with Network(2, arguments=["--metrics", ":9400"], program=LIGHT) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def job(network: Network) -> Iterator[Channel]:
    """A job that trains until it is cancelled. It has tested."""
    network.all_stand_by()
    folder = tiny_job(network.folder)
    settings = {"exchange": "stripes", "microbatch_seconds": 0.001, "test_every": 5}
    channel = network.submit("h1", folder, rounds=1_000_000, **settings)
    until(lambda: values(scrape(network, "h2")).get("nicps_tests_total", 0) >= 2, "two tests")
    yield channel
    channel.close()


def scrape(network: Network, host: str) -> dict[str, Metric]:
    """What an agent exports, by name."""
    child = network.run(host, [sys.executable, "-c", SCRAPE], stdout=subprocess.PIPE, text=True)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: dict[str, Metric]) -> dict[str, float]:
    """Values of all metrics without labels."""
    return {s.name: s.value for f in families.values() for s in f.samples if not s.labels}


def test_an_agent_in_a_job_exports_everything(network: Network, job: Channel) -> None:
    """Each metric has its help, and counts what the status does. Of control frames none was refused."""
    families = scrape(network, "h1")
    names = {family.name.removesuffix("_total") for family in FAMILIES} | {ROUND_SECONDS}
    # As the job's program reports it; no step of this job has a plan.
    absent = {family.name for family in PLANNED if not family.labels} | {"nicps_training_epoch"}
    assert names - families.keys() <= absent
    assert families.keys() <= names
    assert all(family.documentation for family in families.values())
    first = values(families)
    status = network.status("h1")
    time.sleep(0.3)  # a scrape may be of a status that is a fifth of a second old
    second = values(scrape(network, "h1"))
    assert status is not None
    for name, told in (
        ("nicps_rounds_total", status["activity"]["rounds"]),
        ("nicps_token_turns_total", status["token_turns"]),
        ("nicps_fragments_sent_total", status["fragments_sent"]),
        ("nicps_frames_sent_total", status["activity"]["frames_sent"]),
        ("nicps_samples_total", status["activity"]["samples"]),
    ):
        assert 0 < first[name] <= told <= second[name], name
    assert first["nicps_members"] == 2 and first["nicps_members_evicted"] == 0
    assert first["nicps_views_total"] == first["nicps_job_running"] == 1
    assert first["nicps_round_seconds_count"] <= first["nicps_rounds_total"]
    assert first["nicps_round_seconds_sum"] > 0
    of_members = {s.labels["member"]: s.value for s in families["nicps_member_samples"].samples}
    assert of_members.keys() == {"h1", "h2"} and sum(of_members.values()) > 0
    (traffic,) = (
        s.value
        for s in families["nicps_interface_bytes"].samples
        if s.labels["direction"] == "received"
    )
    assert traffic > 0


def dashboard_targets() -> list[tuple[str, str, str]]:
    """Title, expression and legend of every target of the dashboard's panels."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"], target.get("legendFormat", ""))
        for panel in panels
        for target in panel.get("targets", ())
    ]


def test_the_dashboard_shows_what_is_exported(network: Network, job: Channel) -> None:
    """Every metric of every panel, and every label that a panel names, is among what an agent exports."""
    labels: dict[str, set[str]] = {}
    for family in scrape(network, "h1").values():
        labels[family.name] = set(ITS_OWN)
        for sample in family.samples:
            labels.setdefault(sample.name, set(ITS_OWN)).update(sample.labels)
    may_be_absent = {"nicps_training_epoch", "nicps_control_refused_total"}
    labels["nicps_control_refused_total"] = {"reason", *ITS_OWN}  # none was refused
    labels |= {of.name: {*of.labels, *ITS_OWN} for of in PLANNED}  # no step of this job has a plan
    for title, expression, legend in dashboard_targets():
        metrics = set(re.findall(r"\bnicps_\w+", expression))
        assert metrics, title
        for metric in metrics:
            assert metric in labels or metric in may_be_absent, (title, metric)
            named = set(re.findall(r"\{\{(\w+)\}\}", legend)) | set(
                re.findall(r"(\w+)=~?\"", expression)
            )
            named |= {x for by in re.findall(r"by \((\w+)\)", expression) for x in [by]}
            if metric in labels:
                assert named - {"agents"} <= labels[metric], (title, metric, named)


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {m for _, expr, _ in dashboard_targets() for m in re.findall(r"\bnicps_\w+", expr)}
    assert shown == {family.name for family in FAMILIES} | {f"{ROUND_SECONDS}_bucket"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Panels on the grid, none over another; a data source to be chosen; unique numbers."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["description"]
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert "nicps_agent_info" in variables["instance"]["definition"]


def test_nicps_top_shows_the_job(network: Network, job: Channel) -> None:
    for _ in range(20):
        shown = network.command("h2", "top", "--once", "--interval", "0.5")
        assert shown.code == 0 and not shown.err
        if "(broadcast i32)" not in shown.out:  # the exchange of a test
            break
    assert "\x1b" not in shown.out
    status = network.status("h2")
    assert status is not None
    lines = {line.split("  ")[0].strip(): line for line in shown.out.splitlines()}
    assert status["job"] in lines["job"] and "(stripes i16)" in lines["job"]
    assert "2 of 2 members" in lines["state"]
    rate = re.search(r"([\d,.]+) rounds/s", lines["round"])
    assert rate is not None and float(rate[1].replace(",", "")) > 0
    assert re.search(r"^ *1  h1 .*lead", shown.out, re.MULTILINE)
    assert re.search(r"^ *2  h2 .*this host", shown.out, re.MULTILINE)


def test_a_port_that_another_agent_has(network: Network) -> None:
    """One line, and no part of that agent is left."""
    host = network.lab.host("h1")
    program = host.read_link().xdp_mode
    ended = network.command(
        "h1", "join", "--iface", "eth1", "--socket", "@other", "--metrics", "127.0.0.1:9400"
    )
    assert "cannot serve metrics at 127.0.0.1:9400: Address already in use" in ended.only_error(3)
    assert host.read_link().xdp_mode == program
    ended = network.command("h1", "status", "--socket", "@other")
    assert "nicps join" in ended.only_error(4)


def test_without_the_job_its_figures_are_gone(network: Network, job: Channel) -> None:
    """The last of these tests: the job ends."""
    assert network.command("h1", "cancel").code == 0
    network.all_stand_by()
    families = scrape(network, "h1")
    assert not [name for name in families if name.startswith("nicps_training_")]
    assert values(families)["nicps_job_running"] == 0
    assert values(families)["nicps_evictions_total"] == 0
    shown = network.command("h1", "top", "--once", "--interval", "0.2")
    assert shown.code == 0 and re.search(r"^job +none; the last one", shown.out, re.MULTILINE)
