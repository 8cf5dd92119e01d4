# SPDX-License-Identifier: Apache-2.0
"""What reports have in common: one HTML file that needs nothing else and loads nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import JobError
from trainer.svg import text

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #5b6875; --rule: #e3e7eb;
  --compute: #4878a8; --update: #28527a; --testing: #7a5ea8; --wait: #e9edf1; --send: #e8871e;
  --hold: #f6cf9f; --repair: #c02f2f; --dropped: #a9bccf; --accuracy: #2f8f5b;
  --evicted: #c02f2f; --returned: #2f8f5b; --lead: #28527a; --alarm: #8c1d1d; --cancelled: #8a6d1f;
  --differs: #e8871e; --away: #f9dede; --forward: #8fb3d6; --offers: #d9d2e9; --flow: #3f9c8f;
  --behind: #b9dcd6; --marks: #8e7cc3; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; font-weight: 650; }
h2 { font-size: 17px; margin: 0 0 4px; font-weight: 650; }
h3 { font-size: 14px; margin: 22px 0 2px; font-weight: 600; color: var(--soft); }
p { margin: 4px 0 14px; color: var(--soft); max-width: 90ch; }
section { background: #fff; border: 1px solid var(--rule); border-radius: 8px;
  padding: 18px 20px; margin-top: 18px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px;
  margin-top: 18px; }
.tile { background: #fff; border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.tile.bad b { color: var(--repair); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 18px; }
.pair section { margin-top: 18px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg .tick { fill: var(--soft); font-size: 11px; }
svg .name { font-weight: 600; }
.grid { stroke: var(--rule); } .axis { stroke: #9aa5b1; }
polyline { fill: none; stroke-linejoin: round; }
.raw { stroke: #b7c9dc; stroke-width: 1; } .loss { stroke: var(--compute); stroke-width: 2; }
.accuracy { stroke: var(--accuracy); stroke-width: 2; } circle.accuracy { fill: var(--accuracy); }
circle.loss { fill: var(--compute); }
rect.compute { fill: var(--compute); } rect.update { fill: var(--update); }
rect.testing { fill: var(--testing); } rect.wait { fill: var(--wait); }
rect.send { fill: var(--send); } rect.hold { fill: var(--hold); }
rect.repair { fill: var(--repair); } rect.dropped { fill: var(--dropped); }
rect.forward { fill: var(--forward); } rect.offers { fill: var(--offers); }
rect.flow { fill: var(--flow); } rect.behind { fill: var(--behind); } rect.marks { fill: var(--marks); }
rect.lane { fill: #fbfbfc; stroke: var(--rule); stroke-width: .5; }
.commit { stroke: #1f2933; stroke-dasharray: 2 3; stroke-width: .8; opacity: .55; }
.event { stroke-width: 1.1; opacity: .75; } .mark { stroke-width: 1.8; stroke-linejoin: round; }
.evicted { stroke: var(--evicted); fill: none; } .returned { stroke: var(--returned); fill: var(--returned); }
.lead { stroke: var(--lead); fill: var(--lead); } .alarm { stroke: var(--alarm); fill: var(--alarm); }
.cancelled { stroke: var(--cancelled); fill: var(--cancelled); }
.differs { stroke: var(--differs); fill: var(--differs); } .view { stroke: var(--soft); fill: none; }
.test { stroke: var(--testing); fill: #fff; } .event.view { stroke-dasharray: 1 3; }
.event.returned, .event.lead { stroke-dasharray: 5 3; } rect.away { fill: var(--away); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 2px 0 12px; color: var(--soft);
  font-size: 13px; }
.key svg { display: inline-block; width: 14px; height: 14px; margin-right: 6px; vertical-align: -2px; }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 7px; border-bottom: 1px solid var(--rule); }
td { white-space: nowrap; font-size: 14px; }
.events td, .events th { text-align: left; } .events td:last-child { white-space: normal; }
.channels td:last-child, .channels th:last-child { text-align: left; white-space: normal; }
th { color: var(--soft); font-weight: 600; font-size: 13px; line-height: 1.25;
  vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.bar { display: flex; min-width: 110px; height: 14px; background: var(--wait); border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; }
p.slow { color: var(--repair); font-weight: 600; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
.settings { display: flex; flex-wrap: wrap; gap: 4px 22px; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The page: its parts, one below the other."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} - nicps</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def write_page(folder: Path, content: str) -> Path:
    """Write `folder`/report.html and return its path.

    Raises:
        JobError: it cannot be written.
    """
    path = folder / "report.html"
    part = folder / "report.html.part"
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from None
    return path


def tile_of(value: str, name: str, bad: bool = False) -> str:
    """A figure, and below it what it is."""
    kind = "tile bad" if bad else "tile"
    return f'<div class="{kind}"><b>{text(value)}</b><span>{text(name)}</span></div>'


def tile_row(tiles: Iterable[str]) -> str:
    """Tiles beside one another."""
    return f'<div class="tiles">{"".join(tiles)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return f"<table><thead>{cells(head, 'th')}</thead><tbody>{body}</tbody></table>"


def settings_section(settings: Mapping[str, Any]) -> str:
    """All settings, in the order of their names."""
    items = "".join(f"<code>{text(k)}={text(v)}</code>" for k, v in sorted(settings.items()))
    return f'<section><h2>Settings</h2><div class="settings">{items}</div></section>'
