# SPDX-License-Identifier: Apache-2.0
"""Where a switch counts something else than a host behind it, for the same frame: all there is, and why.

Tests hold it both ways: no pair of reasons but these, and no row that does not occur.
"""

from __future__ import annotations

from itertools import product

from tests.vectors import encode

#: Of which frame, what a host counts, what the switch counts.
Pair = tuple[str, str, str]
#: Such pairs, each with each, and why.
Row = tuple[tuple[str, ...], str, str, str]

TOKEN, FRAGMENT, ADD, OTHER = "token", "fragment", "fragment to add", "another frame"
STRIPE, SERVER = "stripe", "server"
DATA = (FRAGMENT, ADD)
ANY = (TOKEN, *DATA)
#: What a host counts that has use for a frame.
TAKEN = ("added", "duplicate", "raised", "heard", "bounced")
#: What a switch counts where a fragment is in a sum, or goes on; where any frame of ours goes on, or is added.
KEPT = ("fragment", "added", "summed", "duplicate", "answered")
PASSED = (*KEPT, "token", "control", "switched", "stripe", "server")

#: The same under another name.
SAME: set[Pair] = {
    (OTHER, "", "switched"),
    *((kind, "network", "switched") for kind in (*ANY, STRIPE, SERVER, OTHER)),
    (OTHER, "probed", "control"),
    *((TOKEN, host, "token") for host in ("raised", "heard", "bounced")),
    (FRAGMENT, "added", "fragment"),
    (ADD, "added", "summed"),
    (ADD, "duplicate", "answered"),
    (ADD, "range", "window"),
}
#: Where the switch refuses it: a host has use for this frame, or had for one like it.
TAKES = "takes"
ROWS: tuple[Row, ...] = (
    # What is between them.
    ((OTHER,), "truncated", "control version", "no wire carries less than 60 bytes: zeros follow"),
    ((OTHER,), "truncated", "control", "the bodies of control frames are the hosts' matter"),
    ((TOKEN,), "truncated", "malformed", "a length below a token's is one that differs"),
    # Stripes and servers: the room is not loaded at a host, and a switch adds none.
    ((STRIPE,), "mode", "stripe stranger view", "a switch lets members' pass"),
    ((SERVER,), "mode", "server stranger view", "the same"),
    # Two faults at once: each names the one that it looks for first.
    (ANY, "view", "stranger truncated malformed", "a host looks at the view first"),
    (ANY, "disabled", "stranger", "a host that is in no view, at that first"),
    (DATA, "truncated malformed round shift range mode", "stranger holder", "a switch, at these"),
    ((ADD,), "round shift range", "malformed round shift", "a switch, at these in this order"),
    # Who may say something, R4 and R10.
    ((TOKEN,), TAKES, "stranger", "hosts know no ports"),
    (DATA, TAKES, "stranger holder", "the same, and no holder; sums from outside are no switch's"),
    (ANY, "echo", "token fragment unlisted", "a host knows what it has sent, a switch its members"),
    # A switch has no key.
    ((TOKEN,), "forged replayed", "token stale", "it believes members' addresses"),
    ((TOKEN,), TAKES, "stale", "it has followed a forged one"),
    (DATA, "forged replayed", "fragment added duplicate", "it believes members' addresses"),
    ((ADD,), "added", "duplicate", "it has added a forged one"),
    # Tokens.
    ((TOKEN,), "view", "token", "a switch follows into a later view, a host is told of it"),
    ((TOKEN,), "malformed", "token stale", "hosts know how many there are, and who has left"),
    ((TOKEN,), "stale", "token", "a host that has bounced one has seen the next"),
    # Fragments that hosts add.
    ((FRAGMENT,), "duplicate", "fragment", "a repeat is for those that lack it"),
    ((FRAGMENT,), "malformed range shift truncated", "fragment", "only hosts look into these"),
    ((FRAGMENT,), "round mode", "fragment", "the same"),
    # Fragments that the switch adds.
    ((ADD,), TAKES, "shift", "a switch takes no shift but 0"),
    ((ADD,), TAKES, "malformed", "a switch adds no raw bytes"),
    ((ADD,), TAKES, "unlisted", "hosts on a plain LAN have no list"),
    ((ADD,), "added", "answered", "the same: who is not in the list may ask"),
    ((ADD,), TAKES, "round", "nor do they wait for one"),
    ((ADD,), TAKES, "window", "a host keeps sums that all have"),
    ((ADD,), "duplicate", "added summed", "a switch has one bank: the next round takes its place"),
    (
        (ADD,),
        "round",
        "added duplicate summed answered unlisted window",
        "a switch's token goes back",
    ),
    ((ADD,), "range", "added duplicate summed answered unlisted", "a switch has slots, not places"),
    ((ADD,), "mode", "round added duplicate", "a host is told who adds, a switch by the fragment"),
)
_ROW_OF: dict[Pair, Row] = {
    pair: row for row in ROWS for pair in product(row[0], row[1].split(), row[2].split())
}


def kind_of(frame: bytes) -> str:
    """What a frame is to both."""
    frame = encode.untagged(frame)
    if frame[12:14] != encode.ETHERTYPE.to_bytes(2, "big") or len(frame) < 18:
        return OTHER
    (name,) = encode.TYPES[frame[15] : frame[15] + 1] or ("",)
    if name == "fragment":
        return ADD if frame[17] & encode.ADD else FRAGMENT
    if name in (*encode.STRIPES, *encode.SERVERS, *encode.DIRECT):
        return STRIPE if name in encode.STRIPES else SERVER
    return TOKEN if name == "token" else OTHER


def difference(kind: str, host: str, switch: str) -> Row | None:
    """None where both mean the same, else the row that allows it; asserts that there is one."""
    if host == switch or (kind, host, switch) in SAME:
        return None
    use = TAKES if host in TAKEN and switch not in PASSED else host
    row = _ROW_OF.get((kind, use, switch))
    assert row is not None, f"{kind}: {host or 'nothing'} at a host, {switch} at the switch"
    return row
