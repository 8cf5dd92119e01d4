# SPDX-License-Identifier: Apache-2.0
"""The table of metrics, and how a status gives the values of each (docs/monitoring.md).

Names follow Prometheus: a unit at the end, `_total` for values that only rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from nicps.session.activity import Activity
from nicps.session.messages import Status

if TYPE_CHECKING:
    from prometheus_client import Metric

#: Values by their labels' values.
Samples: TypeAlias = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name, its kind ("counter", "gauge"), its help, its labels, and its values in a status.

    If a status has no value, as without a job, the metric is not exported.
    """

    name: str
    kind: str
    help: str
    read: Callable[[Status, Activity], float | Samples | None]
    labels: tuple[str, ...] = ()


ROUND_SECONDS = "nicps_round_seconds"
ROUND_SECONDS_HELP = "Time from the commit of a training round to that of the next one."


def _of_members(figure: str) -> Callable[[Status, Activity], Samples]:
    def read(status: Status, activity: Activity) -> Samples:
        names = {member.number: member.name for member in status.members}
        return {
            (str(m.number), names.get(m.number, "")): float(getattr(m, figure))
            for m in activity.members
        }

    return read


def _present(status: Status, _: Activity) -> Samples:
    return {
        (str(member.number), member.name): float(member.state != "left")
        for member in status.members
    }


def _of_channels(figure: str) -> Callable[[Status, Activity], Samples]:
    return lambda _, activity: {
        (str(each.number),): float(getattr(each, figure)) for each in activity.channels
    }


def _awaited_on_channels(status: Status, activity: Activity) -> Samples:
    return {
        (str(each.number), str(member.number), member.name): float(member.number in each.awaits)
        for each in activity.channels
        for member in status.members
    }


def _traffic(received: str, sent: str) -> Callable[[Status, Activity], Samples | None]:
    def read(_: Status, activity: Activity) -> Samples | None:
        if activity.traffic is None:
            return None
        return {
            ("received",): getattr(activity.traffic, received),
            ("sent",): getattr(activity.traffic, sent),
        }

    return read


def _progress(key: str) -> Callable[[Status, Activity], float | None]:
    """A figure that the training program reports, while a job is here."""

    def read(status: Status, _: Activity) -> float | None:
        value = status.progress.get(key) if status.job else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    return read


_MEMBER = ("number", "member")
_STATES = ("standby", "forming", "member")

FAMILIES = (
    Family(
        "nicps_agent_info",
        "gauge",
        "Always 1; the labels say what this agent is.",
        lambda s, _: {(s.network, s.name, s.iface, s.xdp_mode, "yes" if s.keyed else "no"): 1.0},
        ("network", "host", "interface", "xdp_mode", "keyed"),
    ),
    Family("nicps_uptime_seconds", "gauge", "Time since the agent began.", lambda _, a: a.uptime_s),
    Family(
        "nicps_state",
        "gauge",
        "What this host does in the network: 1 for the state that it is in.",
        lambda s, _: {(state,): float(s.state == state) for state in _STATES},
        ("state",),
    ),
    Family("nicps_job_running", "gauge", "1 while a job is here.", lambda s, _: float(bool(s.job))),
    Family(
        "nicps_trouble",
        "gauge",
        "1 while this host stands by in the middle of a job, or hears no majority.",
        lambda s, _: float(bool(s.trouble)),
    ),
    Family(
        "nicps_members",
        "gauge",
        "Members of the list that are in it now (R18).",
        lambda s, _: sum(member.state != "left" for member in s.members),
    ),
    Family(
        "nicps_members_evicted",
        "gauge",
        "Members of the list that have left or were evicted, and are not back.",
        lambda s, _: sum(member.state == "left" for member in s.members),
    ),
    Family(
        "nicps_member_present",
        "gauge",
        "1 for a member that is in the list now.",
        _present,
        _MEMBER,
    ),
    Family(
        "nicps_member_awaited",
        "gauge",
        "1 for a member that the open round waits for, while others are done.",
        _of_members("awaited"),
        _MEMBER,
    ),
    Family(
        "nicps_member_samples_total",
        "counter",
        "Samples of a member that were counted in training rounds.",
        _of_members("samples"),
        _MEMBER,
    ),
    Family(
        "nicps_member_fragments_asked_total",
        "counter",
        "Fragments that a member should have sent to this host, and was asked for again.",
        _of_members("asked"),
        _MEMBER,
    ),
    Family(
        "nicps_member_fragments_retransmitted_total",
        "counter",
        "Fragments that this host has sent again to a member, and to it alone.",
        _of_members("resent"),
        _MEMBER,
    ),
    Family("nicps_view", "gauge", "The number of the member list.", lambda s, _: s.view),
    Family(
        "nicps_views_total", "counter", "Member lists that came into force.", lambda _, a: a.views
    ),
    Family(
        "nicps_evictions_total",
        "counter",
        "Members that were in a list and not in the next one (R17, R18).",
        lambda _, a: a.evictions,
    ),
    Family(
        "nicps_returns_total",
        "counter",
        "Members that came back, or were new (R20).",
        lambda _, a: a.returns,
    ),
    Family("nicps_open_round", "gauge", "The number of the open round.", lambda s, _: s.round),
    Family(
        "nicps_rounds_total",
        "counter",
        "Training rounds that were committed.",
        lambda _, a: a.rounds,
    ),
    Family(
        "nicps_tests_total", "counter", "Tests that were committed (R15).", lambda _, a: a.tests
    ),
    Family(
        "nicps_samples_total",
        "counter",
        "Samples that were counted in training rounds, of all members.",
        lambda _, a: a.samples,
    ),
    Family(
        "nicps_training_loss",
        "gauge",
        "The loss that this host's training program reported last.",
        _progress("loss"),
    ),
    Family(
        "nicps_training_accuracy_ratio",
        "gauge",
        "The accuracy of the last test, from 0 to 1 (R15).",
        _progress("accuracy"),
    ),
    Family(
        "nicps_training_epoch",
        "gauge",
        "Passes over the training data so far, in parts too.",
        _progress("epoch"),
    ),
    Family(
        "nicps_training_rounds",
        "gauge",
        "Training rounds of the job that were committed.",
        _progress("trained_rounds"),
    ),
    Family(
        "nicps_training_step_seconds",
        "gauge",
        "Median time of the last training steps, in a job with `priorities`.",
        _progress("step_seconds"),
    ),
    Family(
        "nicps_training_wait_seconds",
        "gauge",
        "Of that time, what this host's training program waited for the exchange.",
        _progress("wait_seconds"),
    ),
    Family(
        "nicps_training_step_predicted_seconds",
        "gauge",
        "The time that a step should take with the plan of its channels.",
        _progress("predicted_seconds"),
    ),
    Family(
        "nicps_channel_urgency",
        "gauge",
        "A channel's rank on the wire; a larger number goes first.",
        _of_channels("urgency"),
        ("channel",),
    ),
    Family(
        "nicps_channel_open_round",
        "gauge",
        "The number of the channel's open round.",
        _of_channels("round"),
        ("channel",),
    ),
    Family(
        "nicps_channel_member_awaited",
        "gauge",
        "1 for a member that the channel's open round waits for, while others are done.",
        _awaited_on_channels,
        ("channel", *_MEMBER),
    ),
    Family(
        "nicps_channel_rounds_total",
        "counter",
        "Rounds of the channel that were committed.",
        _of_channels("rounds"),
        ("channel",),
    ),
    Family(
        "nicps_channel_bytes_total",
        "counter",
        "Bytes of a gradient, as they are sent, in these rounds.",
        _of_channels("bytes"),
        ("channel",),
    ),
    Family(
        "nicps_token_turns_total",
        "counter",
        "Turns of the token: how often this host had it.",
        lambda s, _: s.token_turns,
    ),
    Family(
        "nicps_token_parked",
        "gauge",
        "1 while the token rests at this host.",
        lambda _, a: float(a.parked),
    ),
    Family(
        "nicps_frames_sent_total",
        "counter",
        "Frames of nicps that the agent has sent, fragments included.",
        lambda _, a: a.frames_sent,
    ),
    Family(
        "nicps_fragments_sent_total",
        "counter",
        "Fragments of gradients that the agent has sent.",
        lambda s, _: s.fragments_sent,
    ),
    Family(
        "nicps_fragments_retransmitted_total",
        "counter",
        "Fragments that the agent has sent again.",
        lambda _, a: a.fragments_resent,
    ),
    Family(
        "nicps_fragments_asked_total",
        "counter",
        "Fragments that the agent has asked for again.",
        lambda _, a: a.fragments_asked,
    ),
    Family(
        "nicps_frames_malformed_total",
        "counter",
        "Frames that the agent could not read.",
        lambda s, _: s.frames_malformed,
    ),
    Family(
        "nicps_control_refused_total",
        "counter",
        "Control frames that were refused, by reason.",
        lambda s, _: {(reason,): count for reason, count in s.control_refused.items()},
        ("reason",),
    ),
    Family(
        "nicps_xdp_frames_total",
        "counter",
        "What the XDP program did with frames of nicps, by reason.",
        lambda s, _: {(reason,): count for reason, count in s.counters.items()},
        ("reason",),
    ),
    Family(
        "nicps_interface_bytes_total",
        "counter",
        "Bytes at the interface, of all protocols.",
        _traffic("received_bytes", "sent_bytes"),
        ("direction",),
    ),
    Family(
        "nicps_interface_frames_total",
        "counter",
        "Frames at the interface, of all protocols.",
        _traffic("received_frames", "sent_frames"),
        ("direction",),
    ),
)


class StatusCollector:
    """One status as metrics, for a registry of prometheus_client."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Every family that the status has a value for."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        status, activity = self._status, self._status.activity
        assert activity is not None, "an agent's own status has it"
        kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for family in FAMILIES:
            values = family.read(status, activity)
            if values is None:
                continue
            metric = kinds[family.kind](family.name, family.help, labels=family.labels)
            samples = values if isinstance(values, Mapping) else {(): values}
            for labels, value in samples.items():
                metric.add_metric(labels, value)
            yield metric
        times = activity.round_seconds
        ends = [*map(str, times.bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(times.counts), strict=True))
        histogram = HistogramMetricFamily(ROUND_SECONDS, ROUND_SECONDS_HELP)
        histogram.add_metric((), buckets, times.sum)
        yield histogram
