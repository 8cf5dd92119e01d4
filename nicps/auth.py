# SPDX-License-Identifier: Apache-2.0
"""Keys, and the tag that every frame carries where there is one.

A member can be trusted, the LAN cannot: who holds the network's key is a member. The network key itself tags only the
frames outside a view; each view has keys of its own, made from the network key, the view's number and a random seed
that its proposer has drawn, so that a frame of an earlier view is worth nothing. That a view is a new one its members
know by the nonces in the INSTALL frames, not by its keys.

What is tagged: all from the version byte to the header's `length`; of control frames the source MAC address, too.

    network key (a file) --+-- tags control frames outside a view
                           `-- view key (view, seed) --+-- 32 bytes: tags control frames of the view
                                                       `-- 16 bytes: SipHash-2-4 in the kernel, for tokens and fragments

Source: RFC 7693 (BLAKE2b with key and personalisation); SipHash is by Aumasson and Bernstein (2012).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from nicps import wire
from nicps.errors import EnvironmentProblem, UsageProblem

KEY_BYTES = 32  # of a fresh network key, and of a key for control frames
SIPHASH_BYTES = 16

_MOST_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
_LARGEST_FILE = 1024  # bytes; anything longer holds no key
_READABLE_BY_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH

_PERSON_CONTROL = b"nicps control"  # at most 16 bytes each
_PERSON_VIEW_CONTROL = b"nicps view ctl"
_PERSON_VIEW_SIPHASH = b"nicps view sip"

_HEADER = wire.Layout.of(wire.Header)
_LENGTH_AT = _HEADER.offsets[_HEADER.names.index("length")]
_TAG_AT = _HEADER.offsets[_HEADER.names.index("tag")]
_TAG_BYTES = _HEADER.wires[_HEADER.names.index("tag")].size


@dataclass(frozen=True, slots=True)
class ControlKey:
    """Tags control frames, and checks their tags."""

    secret: bytes = field(repr=False)

    def sign(self, frame: bytes | bytearray, source: bytes) -> bytes:
        """The frame with its tag filled in.

        Args:
            frame: from the version byte on.
            source: MAC address that it will be sent from, 6 bytes.
        """
        tag = self._tag(frame, source)
        return bytes(frame[:_TAG_AT]) + tag + bytes(frame[_TAG_AT + _TAG_BYTES :])

    def verify(self, frame: bytes | bytearray, source: bytes) -> bool:
        """Whether a holder of the key has made this very frame, and sent it from that MAC address.

        Everything up to the header's `length` is covered; Ethernet padding after it is not.
        """
        if len(frame) < wire.HEADER_BYTES:
            return False
        length = int.from_bytes(frame[_LENGTH_AT : _LENGTH_AT + 2], "big")
        if not wire.HEADER_BYTES <= length <= len(frame):
            return False
        tag = frame[_TAG_AT : _TAG_AT + _TAG_BYTES]
        return hmac.compare_digest(tag, self._tag(frame[:length], source))

    def _tag(self, frame: bytes | bytearray, source: bytes) -> bytes:
        hash = hashlib.blake2b(
            source, key=self.secret, digest_size=_TAG_BYTES, person=_PERSON_CONTROL
        )
        hash.update(frame[:_TAG_AT])
        hash.update(bytes(_TAG_BYTES))
        hash.update(frame[_TAG_AT + _TAG_BYTES :])
        return hash.digest()


@dataclass(frozen=True, slots=True)
class ViewKey(ControlKey):
    """The keys of one view: `secret` tags its control frames, `siphash` in the kernel tokens and what is added."""

    siphash: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NetworkKey(ControlKey):
    """What all hosts of a network share."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a key file: one line, base64.

        Raises:
            EnvironmentProblem: it is not there, is no key, or others can read or change it.
        """
        try:
            # A FIFO in its place must not make us wait.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                _check_owner(path, os.fstat(fd))
                text = file.read(_LARGEST_FILE + 1)
        except IsADirectoryError:
            raise EnvironmentProblem(
                f"the key {path} is a directory: name a file, such as {path / 'NAME.key'}"
            ) from None
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot read the key {path}: {error.strerror}; `nicps key new {path}` makes one"
            ) from None
        try:
            secret = base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            secret = b""
        if not KEY_BYTES <= len(secret) <= _MOST_KEY_BYTES:
            raise EnvironmentProblem(
                f"{path} holds no key, which is one line of base64 with {KEY_BYTES} to {_MOST_KEY_BYTES} bytes:"
                " copy it again from another host, or make one with `nicps key new`"
            )
        return cls(secret)


def view_key(network_key: NetworkKey, view: int, seed: bytes) -> ViewKey:
    """The keys of a view.

    Args:
        seed: 16 random bytes, drawn by one member and agreed on together with the view (`Successor.seed`).
    """
    place = view.to_bytes(4, "big") + seed

    def derive(person: bytes, size: int) -> bytes:
        return hashlib.blake2b(
            place, key=network_key.secret, digest_size=size, person=person
        ).digest()

    return ViewKey(
        derive(_PERSON_VIEW_CONTROL, KEY_BYTES), derive(_PERSON_VIEW_SIPHASH, SIPHASH_BYTES)
    )


def write_key(path: Path) -> None:
    """Write a fresh network key, for the owner's eyes only.

    Raises:
        UsageProblem: something is there already; it is left as it is.
        EnvironmentProblem: the folder is missing, or nothing can be written there.
    """
    line = base64.b64encode(os.urandom(KEY_BYTES)) + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageProblem(
            f"{path} is there already, and a lost key cannot be made again: name another file, or move it away"
        ) from None
    except FileNotFoundError:
        raise EnvironmentProblem(
            f"there is no folder {path.parent}: make it with `mkdir -p -m 700 {path.parent}`"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the key {path}: {error.strerror}") from None
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # whatever the umask is
            file.write(line)
            file.flush()
            os.fsync(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise EnvironmentProblem(f"cannot write the key {path}: {error.strerror}") from None


def nonce() -> int:
    """A fresh random number of 64 bits, not 0."""
    return secrets.randbits(64) or 1


class Sequences:
    """The sequence numbers that have come with one key: each sender's rise, and none is taken twice.

    They are serial numbers (RFC 1982): 0 comes after 2^32 - 1. A key must have served its time before a sender has
    gone half way round; `NUMBERS` is when it asks for another.
    """

    NUMBERS = 1 << 30

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}

    def accept(self, source: bytes, sequence: int) -> bool:
        """Whether the number is greater than all before it from that MAC address; ask only for verified frames."""
        before = self._last.get(source, sequence - 1)
        if not 0 < (sequence - before) % (1 << 32) < 1 << 31:
            return False
        self._last[source] = sequence
        return True


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise EnvironmentProblem(f"the key {path} is no regular file: name the file itself")
    if status.st_uid not in (0, os.geteuid()):
        raise EnvironmentProblem(
            f"the key {path} belongs to user {status.st_uid}, who could change it: `chown root {path}`"
        )
    if status.st_mode & _READABLE_BY_OTHERS:
        raise EnvironmentProblem(
            f"the key {path} has mode {stat.S_IMODE(status.st_mode):04o}, others can read or change it:"
            f" `chmod 600 {path}`"
        )
