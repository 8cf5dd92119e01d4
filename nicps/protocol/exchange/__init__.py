# SPDX-License-Identifier: Apache-2.0
"""How a member of a ring sends its contribution, and gets the others' or their sum.

    base.py       what the control of a round asks of every exchange
    broadcast.py  the holder broadcasts, every kernel adds (R10, R11)
    stripes.py    everybody sends at once, each fragment to the member that adds it up, or all to a Linux switch
    late_sums.py  whom the sums of stripes that lack wait for
    switch.py     everybody sends at once to a P4 switch, which adds
    windows.py    how many fragments are under way to one host, and which are lost
    window_size.py  how many where queues are short
    giving_way.py  how many, while more urgent rounds are open
    steps.py      with servers: a worker's steps and pulls
    servers.py    steps go to parameter servers, which keep what they come to

`nicps/exchange.py` has the kinds themselves.
"""

from nicps.exchange import Exchange
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.exchange.broadcast import BroadcastExchanger
from nicps.protocol.exchange.servers import ServersExchanger
from nicps.protocol.exchange.stripes import StripesExchanger
from nicps.protocol.exchange.switch import SwitchExchanger
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import Phase, Timings
from nicps.protocol.view import View

_EXCHANGERS: dict[Exchange, type[Exchanger]] = {
    Exchange.BROADCAST: BroadcastExchanger,
    Exchange.STRIPES: StripesExchanger,
    Exchange.SWITCH: SwitchExchanger,
    Exchange.LINUX_SWITCH: StripesExchanger,
    Exchange.SERVERS: ServersExchanger,
}


def exchanger_of(
    phase: Phase,
    view: View,
    number: int,
    receiver: Receiver,
    timings: Timings,
    now: float,
    channel: int = 0,
) -> Exchanger:
    """The part of member `number` in the phase's exchange, in that view; `receiver` is of that channel."""
    kind = phase.exchange.among(len(view.live))
    return _EXCHANGERS[kind](kind, phase, view, number, receiver, timings, now, channel)


__all__ = [
    "BroadcastExchanger",
    "Exchanger",
    "ServersExchanger",
    "StripesExchanger",
    "SwitchExchanger",
    "exchanger_of",
]
