# SPDX-License-Identifier: Apache-2.0
"""Fragments that can never be taken: a link does not pass them, or the training program has broken what takes them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from nicps.errors import JobFailed
from nicps.lab.links import port_name
from tests.netns.scenes import Drill, Stage

#: By an order in a file, the training program breaks what it shares with its agent and the kernel.
BREAKS = """
def claim():
    found("Sums")._slots["claim"] = 1

def shift():
    offers = found("Offers")
    handover = offers._handover
    show = handover.show

    def show_broken(round_, fragments):
        offers.arena.shifts[round_ & 1] = 43
        show(round_, fragments)

    handover.show = show_broken

def before_batch():
    for breaks in (claim, shift):
        order = "%s/%s.%s" % (PLACE, breaks.__name__, host())
        if os.path.exists(order):
            os.unlink(order)
            breaks()
"""


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(3, keyed=True), hooks=BREAKS) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Three hosts that train."""
    made.ready()
    return made


def set_port_mtu(drill: Drill, host: str, mtu: int) -> None:
    """Of the switch's port for that host: it drops longer frames, both ways. The host's own interface stays."""
    port = port_name(int(host.removeprefix("h")))
    where = drill.stage.lab.ports_netns
    subprocess.run(
        ["ip", "-n", where, "link", "set", port, "mtu", str(mtu)], check=True, timeout=20.0
    )


def says(drill: Drill, host: str, words: str, before: int = 0) -> None:
    drill.until(lambda: words in drill.stage.log(host)[before:], f"{host} says {words!r}")


@pytest.mark.short("3")
@pytest.mark.parametrize("number", [1, 3])
def test_a_port_that_passes_no_full_frames(drill: Drill, number: int) -> None:
    """Tokens and control frames pass. That host is evicted, also if it leads, and is back once the port is mended."""
    host = drill.host(number)
    others = [name for name in drill.stage.names if name != host]
    before = {name: len(drill.stage.log(name)) for name in drill.stage.names}
    set_port_mtu(drill, host, 1400)
    try:
        drill.goes_on(*others, timeout_s=40.0)
        evicts = [f": {host} takes nothing of what", f": {host} sends what does not reach"]
        assert any(words in drill.stage.log(o)[before[o] :] for o in others for words in evicts)
        says(drill, host, f"{host} lacks ", before[host])
        drill.stands_by(host, saying="the others have gone on without it")
    finally:
        set_port_mtu(drill, host, 1500)
    drill.all_train(90.0)
    # Of a Linux switch, and of stripes, which have made no sum yet, it cannot be known whether they are at fault.
    drill.also = ("broadcast",) if drill.asked == "switch" else ()
    drill.exact()
    drill.await_switch()


@pytest.mark.needs_exchange("broadcast", "training programs cannot write to the sums of stripes")
def test_a_claim_that_stays_set(drill: Drill) -> None:
    """The training program can write to the slots. Nothing is taken at that host until it comes back to new ones."""
    host = drill.host(2)
    before = {name: len(drill.stage.log(name)) for name in drill.stage.names}
    (drill.place / f"claim.{host}").touch()
    for name in drill.stage.names:
        says(drill, name, f"{host} lacks fragments (", before[name])
    for name in drill.stage.names:
        if name != host:
            says(drill, name, f": {host} takes nothing of what the others send again", before[name])
    says(drill, host, "standing by: ", before[host])
    drill.all_train(60.0)
    drill.exact()


@pytest.mark.needs_exchange("broadcast", "aggregators refuse exponents of stripes (tests/xdp)")
def test_a_shift_over_the_limit(drill: Drill) -> None:
    """The host does not send it, and the job ends for all with one line that names host, round and fragment."""
    host = drill.host(2)
    (drill.place / f"shift.{host}").touch()
    assert drill.channel is not None
    said = f"{host}: fragment 0 of round [0-9]+ has a shift of 43, and at most 42 can be added: "
    with pytest.raises(JobFailed, match=said):
        drill.stage.finished(drill.channel, 40.0)
