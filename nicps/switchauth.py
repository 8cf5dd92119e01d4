# SPDX-License-Identifier: Apache-2.0
"""The key of a Linux switch that adds: who may speak for the switch, and who may grant it a view.

The switch and the members that believe it have one file. It is not the network's key, which a switch never has.

    switch's key (a file) --+-- 32 bytes: tags HELLO and READY (`ControlKey`)
                            `-- 32 bytes: seals GRANT (ChaCha20-Poly1305)

A grant is sealed for one address, one nonce and one view: MAC address, header and body are associated data, with zeros
for the header's `length`, which sealing changes, and `tag`. Its tail is a random nonce, what is sealed, and its tag.

Source: docs/linux-switch.md; RFC 8439 (ChaCha20-Poly1305). The package `cryptography` is imported where it is used.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from nicps import wire
from nicps.auth import KEY_BYTES, ControlKey, NetworkKey
from nicps.errors import NetworkProblem
from nicps.extras import require_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

_PERSON_CONTROL = b"nicps switch ctl"  # at most 16 bytes each
_PERSON_SEAL = b"nicps switch aea"

_NONCE_BYTES, _TAG_BYTES = 12, 16
_HEADER = wire.Layout.of(wire.Header)
_BODY_END = wire.HEADER_BYTES + wire.Layout.of(wire.Switch).struct.size
_LENGTH_AT = _HEADER.offsets[_HEADER.names.index("length")]
_TAG_AT = _HEADER.offsets[_HEADER.names.index("tag")]


class Unsealed(NetworkProblem):
    """A grant that no holder of the switch's key has made for this frame."""


@dataclass(frozen=True, slots=True)
class SwitchKey:
    """What a switch and those that believe it share.

    Attributes:
        control: tags HELLO and READY. The switch is the sender, from `wire.SWITCH`.
    """

    control: ControlKey
    _sealing: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Self:
        """The keys that are made of what the file holds."""

        def derive(person: bytes) -> bytes:
            return hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=person).digest()

        return cls(ControlKey(derive(_PERSON_CONTROL)), derive(_PERSON_SEAL))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a key file, as `NetworkKey.read` does.

        Raises:
            EnvironmentProblem: it is no key, others can read it, or the package that seals is not installed.
        """
        require_extra("cryptography")
        return cls.of(NetworkKey.read(path).secret)

    def seal(self, frame: bytes, source: bytes) -> bytes:
        """A GRANT frame, from its version byte on, with its tail sealed.

        Args:
            source: MAC address that it will be sent from, 6 bytes.
        """
        nonce, plain = os.urandom(_NONCE_BYTES), frame[_BODY_END:]
        sealed = self._cipher().encrypt(nonce, plain, _associated(frame, source))
        return _with_tail(frame, nonce + sealed)

    def open(self, frame: bytes, source: bytes) -> bytes:
        """The GRANT frame as it was before it was sealed; Ethernet padding after it is left out.

        Raises:
            WireError: it is not as long as it says.
            Unsealed: it was made under another key, for another address, or was changed.
        """
        from cryptography.exceptions import InvalidTag

        tail = frame[_BODY_END : wire.unpack_header(frame).length]
        if len(tail) < _NONCE_BYTES + _TAG_BYTES:
            raise Unsealed(f"a sealed grant has {len(tail)} bytes")
        nonce, sealed = tail[:_NONCE_BYTES], tail[_NONCE_BYTES:]
        try:
            plain = self._cipher().decrypt(nonce, sealed, _associated(frame, source))
        except InvalidTag:
            raise Unsealed(
                f"the grant from {wire.mac_text(source)} was sealed under another key, or was changed"
            ) from None
        return _with_tail(frame, plain)

    def _cipher(self) -> ChaCha20Poly1305:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        return ChaCha20Poly1305(self._sealing)


def _associated(frame: bytes, source: bytes) -> bytes:
    """What a grant is bound to: the sender's address, and header and body without `length` and `tag`."""
    bound = bytearray(frame[:_BODY_END])
    bound[_LENGTH_AT : _LENGTH_AT + 2] = bytes(2)
    bound[_TAG_AT : _TAG_AT + 8] = bytes(8)
    return source + bytes(bound)


def _with_tail(frame: bytes, tail: bytes) -> bytes:
    made = bytearray(frame[:_BODY_END]) + tail
    made[_LENGTH_AT : _LENGTH_AT + 2] = len(made).to_bytes(2, "big")
    return bytes(made)
