# SPDX-License-Identifier: Apache-2.0
"""How a member of a ring sends its contribution, and gets the others' or their sum.

    base.py       what the control of a round asks of every exchange
    broadcast.py  the holder broadcasts, every kernel adds (R10, R11)
    stripes.py    everybody sends at once, each fragment to the member that adds it up
    switch.py     the holder feeds a switch, which adds

`nicps/exchange.py` has the kinds themselves.
"""

from nicps.exchange import Exchange
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.exchange.broadcast import BroadcastExchanger
from nicps.protocol.exchange.stripes import StripesExchanger
from nicps.protocol.exchange.switch import SwitchExchanger
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import Phase, Timings
from nicps.protocol.view import View


def exchanger_of(
    phase: Phase, view: View, number: int, receiver: Receiver, timings: Timings, now: float
) -> Exchanger:
    """The part of member `number` in the phase's exchange, in that view."""
    kind = phase.exchange.among(len(view.live))
    if kind == Exchange.SWITCH:
        return SwitchExchanger(kind, phase, view, number, receiver, timings, now)
    if kind == Exchange.STRIPES:
        return StripesExchanger(kind, phase, view, number, receiver, timings)
    return BroadcastExchanger(kind, phase, view, number, receiver, timings)


__all__ = ["BroadcastExchanger", "Exchanger", "StripesExchanger", "SwitchExchanger", "exchanger_of"]
