# SPDX-License-Identifier: Apache-2.0
"""The maps' records out of the C header, and the sources put into one text."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from nicps import bpf_sources, wire
from nicps.errors import EnvironmentProblem
from nicps.layout import layout, parse


def test_parse() -> None:
    found = parse(
        """
        #define NICPS_MANY 12 /* a size */
        /* struct nicps_old { __u8 gone; }; */
        struct nicps_thing {
            __u64 big; /* __u8 not_this; */
            __u16 small;
            __u8 bytes[6];
            __u32 words[NICPS_MANY / 4];
        };
        enum nicps_count {
            NICPS_COUNT_ONE, /* first */
            NICPS_COUNT_TWO,
            NICPS_COUNTERS,
        };
        """
    )
    assert found.limits == {"MANY": 12}
    assert found.counters == ("one", "two")
    thing = found.records["thing"]
    assert list(found.records) == ["thing"]
    assert thing.fields is not None
    assert {name: thing.fields[name][1] for name in thing.names or ()} == {
        "big": 0,
        "small": 8,
        "bytes": 10,
        "words": 16,
    }
    assert thing.itemsize == 32, "padded as C does"


def test_the_headers_records_are_the_compilers() -> None:
    records, limits = layout().records, layout().limits
    assert records["config"].itemsize == 176
    assert (records["channel"].itemsize, records["sent"].itemsize) == (64, 16)
    assert (records["window"].itemsize, records["token_window"].itemsize) == (40, 16)
    assert (records["desk"].itemsize, limits["DESK_MEMBERS"]) == (488, wire.DIRECT_MEMBERS)
    assert limits["DESK_FRAGMENTS"] == wire.DIRECT_FRAGMENTS
    assert (limits["CHANNELS"], limits["SENDERS"]) == (wire.MAX_CHANNELS, wire.MAX_MEMBERS + 1)
    assert limits["COUNTS"] == wire.MAX_MEMBERS + wire.MAX_CHANNELS
    assert (records["switch_config"].itemsize, records["message"].itemsize) == (40, 64)
    assert (records["place"].itemsize, records["told"].itemsize) == (48, 16)
    assert records["lanes"].itemsize == wire.PAYLOAD_BYTES
    assert records["bell"].itemsize == 32
    assert (records["slot"].itemsize, records["progress"].itemsize) == (24, 16)
    assert records["block"].itemsize == limits["BLOCK_BYTES"] == wire.BLOCK_LANES * 8
    assert records["member"].itemsize == 8
    assert records["gather"].itemsize == 48
    assert (records["stored"].itemsize, records["own"].itemsize) == (32 + 1440, 8 + 1440)
    assert (records["home"].itemsize, records["pusher"].itemsize) == (296, 24)
    assert limits["WORKERS"] == wire.MAX_MEMBERS
    assert limits["LANE_BYTES"] == wire.PAYLOAD_BYTES
    assert records["saved"].itemsize == 16 + limits["SAVED_BYTES"]
    assert limits["SENDERS"] == wire.MAX_MEMBERS + 1
    assert limits["SAVED_BYTES"] >= wire.MAX_FRAME_BYTES
    assert limits["BLOCK_SLOTS"] * wire.PAYLOAD_BYTES == limits["BLOCK_BYTES"]
    assert records["block"]["lane"].base == np.dtype("u8")


def test_every_setting_is_read_by_a_program() -> None:
    """One that is read by nobody looks as if the kernel acted on it."""
    programs = [*bpf_sources.folder().glob("*.c"), *bpf_sources.folder().glob("*.h")]
    read = set(re.findall(r"\bconfig->(\w+)", "".join(path.read_text() for path in programs)))
    records = layout().records
    settings = {name for of in ("config", "switch_config") for name in records[of].names or ()}
    assert read == settings - {"reserved"}


def test_flatten(tmp_path: Path) -> None:
    (tmp_path / "inner.h").write_text("int inner;\n")
    (tmp_path / "outer.h").write_text('#include "inner.h"\nint outer;\n')
    source = tmp_path / "main.c"
    source.write_text('#include <linux/types.h>\n#include "outer.h"\nint last;\n')
    lines = bpf_sources.flatten(source).splitlines()
    assert [line for line in lines if line and not line.startswith("#line")] == [
        "#include <linux/types.h>",
        "int inner;",
        "int outer;",
        "int last;",
    ]
    assert lines[lines.index("int last;") - 1] == '#line 3 "main.c"'
    source.write_text('\n#include "nothing.h"\n')
    with pytest.raises(EnvironmentProblem, match=r"main\.c:2: nothing\.h is not there"):
        bpf_sources.flatten(source)


def test_a_header_of_several_files_is_put_in_place_in_each(tmp_path: Path) -> None:
    """Whether it counts once is said by its guard."""
    (tmp_path / "inner.h").write_text("int inner;\n")
    for name in ("one", "other"):
        (tmp_path / f"{name}.h").write_text(f'#include "inner.h"\nint {name};\n')
    source = tmp_path / "main.c"
    source.write_text('#include "one.h"\n#include "inner.h"\n#include "other.h"\n')
    lines = bpf_sources.flatten(source).splitlines()
    assert [line for line in lines if line and not line.startswith("#line")] == [
        *("int inner;", "int one;", "int inner;", "int inner;", "int other;")
    ]


def test_no_such_source() -> None:
    with pytest.raises(EnvironmentProblem, match=r"no_such\.c is not there"):
        bpf_sources.path("no_such.c")
