# SPDX-License-Identifier: Apache-2.0
"""Grey pictures, for a page that loads nothing: PNG in a data address."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from trainer.svg import text

Grey = npt.NDArray[np.uint8]  # height x width


def png(picture: Grey) -> bytes:
    """A PNG file of 8 bits of grey a pixel (RFC 2083)."""
    height, width = picture.shape
    lines = b"".join(b"\0" + line.tobytes() for line in picture)  # each without a filter

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def grey(values: npt.NDArray[np.float32], low: float, high: float) -> Grey:
    """Black at `low`, white at `high`."""
    share = (values - low) / max(high - low, 1e-12)
    return np.rint(np.clip(share, 0.0, 1.0) * 255).astype(np.uint8)


def sheet(pictures: Sequence[Grey], columns: int) -> Grey:
    """Pictures of one size in rows, with a line of one pixel between them."""
    height, width = pictures[0].shape
    rows = -(-len(pictures) // columns)
    whole = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), 96, np.uint8)
    for at, picture in enumerate(pictures):
        y, x = at // columns * (height + 1), at % columns * (width + 1)
        whole[y : y + height, x : x + width] = picture
    return whole


def image(picture: Grey, label: str, zoom: int = 2) -> str:
    """The HTML element; `zoom` pixels of the screen for one of the picture."""
    height, width = picture.shape
    content = base64.b64encode(png(picture)).decode()
    return (
        f'<img alt="{text(label)}" width="{width * zoom}" height="{height * zoom}" '
        f'style="image-rendering:pixelated" src="data:image/png;base64,{content}">'
    )


def captioned(pictures: Iterable[tuple[Grey, str]], zoom: int = 2) -> str:
    """Pictures beside one another, each with a line below it."""
    items = (
        f'<figure style="margin:0;font-size:13px">{image(picture, words, zoom)}'
        f"<figcaption>{text(words)}</figcaption></figure>"
        for picture, words in pictures
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(items)}</div>'
