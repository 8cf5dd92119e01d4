# SPDX-License-Identifier: Apache-2.0
"""The settings of a lab, and the units of its options."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from nicps import wire
from nicps.errors import UsageProblem
from nicps.rates import LEAST_RATE_BPS, MOST_RATE_BPS

MOST_HOSTS = 64
LEAST_MTU = 576  # of a lab; agents need `wire.LEAST_MTU`
MOST_MTU = (
    65_521  # with one above 3,500 or so a veth takes only XDP programs that know fragmented frames
)
SWITCHES = ("bridge", "xdp")
MOST_DELAY_MS = 10_000.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_PROBABILITY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")
_DELAY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:ms)?")


@dataclass(frozen=True)
class LabSettings:
    """One lab: a switch with `hosts` ports.

    `rate_bps` shapes both ends of every cable, in bits per second (None: unshaped); `loss` is the
    probability, 0 to 1, that a switch port drops a frame, in each direction on its own. `switch` is
    `bridge`, or `xdp`: a namespace for `nicps switch xdp run`, behind cables that have a middle. `burst_bytes` pass a
    shaped cable at once after a pause. With `priorities` ports send frames of a higher 802.1p priority first, at that
    rate. The hosts' ends are not shaped then: `nicps join --shape` can do that. A port of the switch has room for
    `queue_bytes` of frames that wait; what comes beyond that is lost. At most a quarter of that passes at once after a
    pause.
    """

    name: str = "lab"
    hosts: int = 4
    rate_bps: int | None = None
    mtu: int = wire.LEAST_MTU
    loss: float = 0.0
    switch: str = "bridge"
    burst_bytes: int = 128 * 1024
    priorities: bool = False
    queue_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageProblem(
                f"{self.name!r} cannot name a lab: up to 40 letters, digits and _ . - are allowed"
            )
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise UsageProblem(f"a lab has 1 to {MOST_HOSTS} hosts, not {self.hosts}")
        if not LEAST_MTU <= self.mtu <= MOST_MTU:
            raise UsageProblem(f"the MTU must be {LEAST_MTU} to {MOST_MTU}, not {self.mtu}")
        if not 0.0 <= self.loss <= 1.0:
            raise UsageProblem(f"the loss must be 0 to 1 (or 0% to 100%), not {self.loss}")
        if self.rate_bps is not None and not LEAST_RATE_BPS <= self.rate_bps <= MOST_RATE_BPS:
            raise UsageProblem(f"the rate must be 8kbit to 34gbit, not {self.rate_bps} bit/s")
        if self.priorities and (self.rate_bps is None or self.adds):
            raise UsageProblem(
                "priorities need a rate (--rate): without one no frame waits for another; and a bridge as the switch"
            )
        if self.queue_bytes < self.mtu + wire.ETHERNET_BYTES:
            raise UsageProblem(
                f"a port's queue must have room for a frame of {self.mtu + wire.ETHERNET_BYTES} bytes, not for"
                f" {self.queue_bytes} (--queue)"
            )
        small = self.queue_bytes != LabSettings.queue_bytes
        if small and (self.rate_bps is None or self.priorities):
            raise UsageProblem(
                "--queue needs --rate, as frames wait nowhere without it, and no --priorities"
            )
        if self.switch not in SWITCHES:
            raise UsageProblem(
                f"a lab's switch is one of {', '.join(SWITCHES)}, not {self.switch!r}"
            )
        if self.adds and self.mtu < wire.LEAST_MTU:
            raise UsageProblem(
                f"a switch that adds needs an MTU of {wire.LEAST_MTU} at least, not {self.mtu}"
            )

    @property
    def adds(self) -> bool:
        """Whether its switch adds."""
        return self.switch == "xdp"


@dataclass(frozen=True)
class Faults:
    """The faults of a switch port, in each direction on its own.

    Probabilities, 0 to 1: `loss`; `duplicate`, two frames arrive instead of one; `corrupt`, one byte
    behind the Ethernet header becomes another; `reorder`, the frame is held back for up to 5 ms,
    so that later ones overtake it. `delay_ms` is what every frame waits.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "corrupt", "reorder"):
            if not 0.0 <= (share := getattr(self, name)) <= 1.0:
                raise UsageProblem(f"{name} must be 0 to 1 (or 0% to 100%), not {share}")
        if not 0.0 <= self.delay_ms <= MOST_DELAY_MS:
            raise UsageProblem(
                f"the delay must be 0 to {MOST_DELAY_MS:.0f} milliseconds, not {self.delay_ms}"
            )

    def __str__(self) -> str:
        """`loss 5%, delay 3 ms`; empty without faults."""
        shares = asdict(self)
        delay_ms = shares.pop("delay_ms")
        words = [f"{name} {100 * share:.4g}%" for name, share in shares.items() if share]
        return ", ".join([*words, *([f"delay {delay_ms:g} ms"] if delay_ms else [])])


def parse_probability(text: str, what: str) -> float:
    """A probability from `2%` or `0.02`; `what` is the word for it in an error."""
    match = _PROBABILITY.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"{text!r} is not a {what}: write 2% or 0.02")
    share = float(match[1]) / (100.0 if match[2] else 1.0)
    if share > 1.0:
        raise UsageProblem(f"a {what} of {text} is more than everything: write 2% or 0.02")
    return share


def parse_loss(text: str) -> float:
    """A probability of loss."""
    return parse_probability(text, "loss")


def parse_delay(text: str) -> float:
    """Milliseconds from `20`, `0.5` or `20ms`."""
    match = _DELAY.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"{text!r} is not a delay: write milliseconds, 20 or 0.5")
    return float(match[1])
