# SPDX-License-Identifier: Apache-2.0
"""The network's key, the views' keys made from it, and a Linux switch's: which frames this agent accepts.

Tokens, fragments and frames of stripes are signed and checked in the kernel. This module handles control frames. Those
outside a view are tagged with the network key and bound to fresh nonces; those of a view have a key of their own, under
numbers that only rise. Frames of a Linux switch are tagged with the switch's key, under numbers that rise in one boot;
grants to it are sealed with that key.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Self

from nicps import wire
from nicps.auth import NetworkKey, Sequences, ViewKey, view_key
from nicps.errors import UsageProblem
from nicps.protocol import View
from nicps.switchauth import SwitchKey

#: Signed and checked in the kernel; those that it passes up are a member's, and fresh. Only LACKING may come again:
#: `StripeFrames.takes_answer` takes each once.
_KERNELS = (wire.FrameType.TOKEN, wire.FrameType.FRAGMENT, wire.FrameType.LACKING)
_HEADER = wire.Layout.of(wire.Header)
_VIEW_AT = _HEADER.offsets[_HEADER.names.index("view")]
_SEQUENCE_AT = _HEADER.offsets[_HEADER.names.index("sequence")]
_SWITCH = wire.Layout.of(wire.Switch)
_BOOT_AT, _STEP_AT = (
    wire.HEADER_BYTES + _SWITCH.offsets[_SWITCH.names.index(name)] for name in ("boot", "step")
)
_GRANT = wire.Layout.of(wire.Grant)
_SIPHASH_AT = (
    wire.HEADER_BYTES + _SWITCH.struct.size + _GRANT.offsets[_GRANT.names.index("siphash")]
)
_BOOTS = 2  # of a switch: the newest, and the one before
_QUIET_S = 60.0  # between two warnings, because any host can send such frames
_SWITCH_ROW = 3  # frames of a switch: one that a cable has spoilt makes no doubt
_DOUBT_S = 300.0  # without more of them the doubt ends


class Doubt:
    """Whether two have different keys, as the frames show that have another key's tag, or none.

    Args:
        row: so many of them make a doubt, with none between that is good.

    Attributes: `count`, those that make one; `holds`, the user has been told, and it has not ended.
    """

    def __init__(self, row: int = 1) -> None:
        self.count, self.holds = 0, False
        self._row, self._in_row, self._told = row, 0, 0
        self._quiet_until = 0.0

    def note(self) -> None:
        """One more."""
        self._in_row += 1
        self.count += self._in_row >= self._row

    def end(self) -> None:
        """A good one has come."""
        self._in_row, self._told, self.holds = 0, self.count, False

    def is_due(self, now: float) -> bool:
        """Whether to tell the user. Some minutes after the last of these frames the doubt ends."""
        if now < self._quiet_until:
            return False
        if self.count == self._told:
            self.holds = self.holds and now < self._quiet_until + _DOUBT_S
            return False
        self._told, self._quiet_until, self.holds = self.count, now + _QUIET_S, True
        return True


class Keyring:
    """Without a key every frame is admitted.

    Args:
        switch: the key of a Linux switch that this host believes.

    Attributes: `refused` counts by reason; `strange`, those of them that were sent under another network key, or none;
    `strange_switch`, those of a switch that were sent under another key than this host's, or none. `numbers`, how far
    this host's numbers have come in the view in force, as its control frames show.
    """

    def __init__(self, network: NetworkKey | None, switch: SwitchKey | None = None) -> None:
        self._network, self._switch = network, switch
        self._boots: dict[int, Sequences] = {}  # the numbers of a switch's frames
        self._views: dict[int, tuple[ViewKey, Sequences]] = {}  # this one, and the one before
        self.refused: Counter[str] = Counter()
        self.strange, self.strange_switch = Doubt(), Doubt(_SWITCH_ROW)
        self.numbers = 0
        self._view, self._first = 0, -1  # the view in force, and the first of these numbers

    @classmethod
    def read(cls, path: Path | None, switch: Path | None = None) -> Self:
        """The key in that file, if there is one, and that of a Linux switch.

        Raises:
            EnvironmentProblem: it is no key, or others can read it.
            UsageProblem: the two are one key.
        """
        network = NetworkKey.read(path) if path is not None else None
        if switch is None:
            return cls(network)
        key = SwitchKey.read(switch)
        if network is not None and key == SwitchKey.of(network.secret):
            raise UsageProblem(
                f"{switch} holds the network's key, which a switch must not have: make another with"
                " `nicps key new FILE`, for the switch and its hosts"
            )
        return cls(network, key)

    @property
    def keyed(self) -> bool:
        """Whether the network has a key."""
        return self._network is not None

    def enter(self, view: View) -> bytes | None:
        """A view is in force: make its key for the kernel."""
        if self._network is None:
            return None
        key = view_key(self._network, view.number, view.seed)
        before = max((n for n in self._views if n < view.number), default=0)
        self._views = {n: kept for n, kept in self._views.items() if n == before}
        self._views[view.number] = key, Sequences()
        self._view, self._first, self.numbers = view.number, -1, 0
        return key.siphash

    def is_spent(self, *numbers: int) -> bool:
        """Whether the view needs another key soon: `numbers` of the kernel's, or those of control frames, are many.

        Small rounds take more control frames than others, and the kernel does not count them.
        """
        return max(self.numbers, *numbers) >= Sequences.NUMBERS

    def sign(self, frame: bytes, source: bytes) -> bytes:
        """Tag a control frame of ours; a grant to a switch gets the view's key in it, and is sealed."""
        if self._network is None:
            return frame
        view = _u32(frame, _VIEW_AT)
        if frame[1] == wire.FrameType.SWITCH:
            assert self._switch is not None and view in self._views, "nothing to grant"
            siphash = self._views[view][0].siphash
            frame = frame[:_SIPHASH_AT] + siphash + frame[_SIPHASH_AT + len(siphash) :]
            return self._switch.seal(frame, source)
        if view and view == self._view:
            self._note_number(_u32(frame, _SEQUENCE_AT))
        key = self._views[view][0] if view in self._views else self._network
        return key.sign(frame, source)

    def _note_number(self, number: int) -> None:
        self._first = number if self._first < 0 else self._first
        ahead = (number - self._first) % (1 << 32)
        if ahead < 1 << 31:  # else it was made before the first one
            self.numbers = max(self.numbers, ahead)

    def admits(self, source: bytes, frame: bytes, own: bytes) -> bool:
        """Whether a frame that came up is a member's, and fresh; one with our `own` address is not."""
        if source == own:
            self.refused["echo"] += 1
            return False
        if len(frame) < wire.HEADER_BYTES:
            return True
        if frame[1] == wire.FrameType.SWITCH:
            return self._admits_switch(source, frame)
        if self._network is None or frame[1] in _KERNELS:
            return True
        view = _u32(frame, _VIEW_AT)
        if view == 0:
            if self._network.verify(frame, source):
                return True
            self.refused["forged"] += 1
            self.strange.note()
            return False
        known = self._views.get(view)
        if known is None:
            self.refused["view"] += 1
            return False
        key, sequences = known
        if not key.verify(frame, source):
            self.refused["forged"] += 1
            return False
        if not sequences.accept(source, _u32(frame, _SEQUENCE_AT)):
            self.refused["replayed"] += 1
            return False
        return True

    def _admits_switch(self, source: bytes, frame: bytes) -> bool:
        """Whether a frame is from a switch that adds, and fresh. Grants of members to it are not for this host.

        A host that has no key for the switch believes none of its frames, and is still told that it is there.
        """
        if len(frame) <= _STEP_AT or frame[_STEP_AT] == wire.SwitchStep.GRANT:
            return False
        if source != wire.SWITCH:
            self.refused["stranger"] += 1
            return False
        if self._switch is None:
            return True
        if not self._switch.control.verify(frame, source):
            self.refused["forged"] += 1
            self.strange_switch.note()
            return False
        boot = int.from_bytes(frame[_BOOT_AT : _BOOT_AT + 8], "big")
        self._boots.setdefault(boot, Sequences())
        self._boots = {one: self._boots[one] for one in sorted(self._boots)[-_BOOTS:]}
        numbers = self._boots.get(boot)
        if numbers is None or not numbers.accept(source, _u32(frame, _SEQUENCE_AT)):
            self.refused["replayed"] += 1
            return False
        self.strange_switch.end()
        return True

    @property
    def doubt(self) -> str:
        """A warning for the user if keys may differ, of hosts or of a switch and this host; otherwise an empty text."""
        return self._describe(self.strange.holds, self.strange_switch.holds)

    def find_doubt(self, now: float) -> str:
        """What of the warning is due: each part once a minute at most, and only if more such frames have come."""
        return self._describe(self.strange.is_due(now), self.strange_switch.is_due(now))

    def _describe(self, network: bool, switch: bool) -> str:
        parts = []
        if network:
            parts.append(
                f"frames of this network with a tag of another key, or none: {self.strange.count} so far; is the key"
                " file the same on all hosts?"
            )
        if switch:
            parts.append(
                "a switch that adds is heard, and is not believed: its frames have the tag of another key, or none; is"
                " the file of --switch-key that of `nicps switch xdp run --key` there?"
            )
        return "; ".join(parts)


def _u32(frame: bytes, at: int) -> int:
    return int.from_bytes(frame[at : at + 4], "big")
