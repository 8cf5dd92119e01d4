# SPDX-License-Identifier: Apache-2.0
"""report.html of a run: errors by epoch, filters, reconstructions, the confusion matrix, the worst digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.dbn import network
from trainer.dbn.checkpoint import State
from trainer.dbn.master import form_of
from trainer.dbn.pictures import Grey, captioned, grey, image, sheet
from trainer.dbn.progress import duration, judged
from trainer.dbn.shards import Data
from trainer.dbn.vectors import Vector
from trainer.dbn.work import predictions
from trainer.page import page, settings_section, table, tile_of, tile_row, write_page
from trainer.svg import Series, chart, text

FILTERS, COLUMNS = 100, 20
DIGITS = 20  # that are reconstructed
WORST = 40
BRIGHT = 0.995  # the share of weights that are shown as what they are: a few large ones would make all others grey


def write_report(folder: Path, state: State, data: Data, found: Vector, master: str) -> Path:
    """Write it, and return its path.

    Args:
        found: the classifier's parameters.
        master: where the workers were, for people.

    Raises:
        JobError: it cannot be written.
    """
    form = form_of(state.settings, data)
    chances = predictions(form.classifier(found), data.test).numpy()
    wrong = int((chances.argmax(1) != data.test.labels).sum())
    settings = state.settings
    sizes = "-".join(map(str, (form.pixels, *settings.layers, form.classes)))
    tiles = [
        tile_of(f"{wrong / len(data.test):.2%}", "test error"),
        tile_of(f"{wrong:,} of {len(data.test):,}", "wrong"),
        tile_of(str(settings.workers), "workers"),
        tile_of(f"{settings.epochs} + {settings.finetune}", "epochs: each layer, fine-tuning"),
        tile_of(duration(state.seconds), "training"),
    ]
    parts = [
        f"<h1>Deep belief network {sizes}</h1><p>{text(folder.name)}; {text(master)}</p>",
        tile_row(tiles),
        _curves(state),
        _filters(state, data, found),
        *([_reconstructions(state, data)] if settings.epochs else []),
        _confusion(chances, data),
        _worst(chances, data),
        settings_section(settings.in_force()),
    ]
    return write_page(folder, page("Deep belief network", parts))


def _curves(state: State) -> str:
    last = len(state.settings.layers)
    charts = []
    for phase in range(last):
        points = [(float(r["epoch"]), r["error"]) for r in state.rows if r["phase"] == phase]
        if points:
            drawn = chart([Series(points, "loss")], "epoch", "reconstruction error")
            note = "Squared error of a reconstruction, summed over the units below."
            charts.append(f"<section><h2>Layer {phase + 1}</h2><p>{note}</p>{drawn}</section>")
    rows = [r for r in state.rows if r["phase"] == last]
    if rows:
        loss = [(float(r["epoch"]), r["loss"]) for r in rows]
        name = judged(rows[0])
        words = name.replace("_", " ")
        error = [(float(r["epoch"]), r[name] * 100) for r in rows]
        charts += [
            "<section><h2>Fine-tuning: loss</h2><p>Cross-entropy of the training data in nats, with dropout if there "
            f"is any.</p>{chart([Series(loss, 'loss')], 'epoch', 'loss', log=min(p[1] for p in loss) > 0)}</section>",
            f"<section><h2>Fine-tuning: {words}</h2><p>In per cent.</p>"
            f"{chart([Series(error, 'accuracy')], 'epoch', words, log=min(p[1] for p in error) > 0)}</section>",
        ]
    return f'<div class="pair">{"".join(charts)}</div>'


def _filters(state: State, data: Data, found: Vector) -> str:
    form = form_of(state.settings, data)
    after = form.classifier(found)[0].weights.numpy()
    before = form.stack(state.done)[0].weights.numpy()
    reach = float(np.quantile(np.abs(before), BRIGHT))

    def drawn(weights: npt.NDArray[np.float32]) -> str:
        shown = [
            grey(weights[:, unit].reshape(data.side), -reach, reach)
            for unit in range(min(FILTERS, weights.shape[1]))
        ]
        return image(sheet(shown, COLUMNS), "filters")

    first = (
        "After pre-training" if state.settings.epochs else "Before fine-tuning, as they were drawn"
    )
    last = f"<h3>After fine-tuning</h3>{drawn(after)}" if state.settings.finetune else ""
    return (
        "<section><h2>Filters of the first layer</h2><p>Weights from the picture to a hidden unit: black is negative, "
        f"white positive.</p><h3>{first}</h3>{drawn(before)}{last}</section>"
    )


def _reconstructions(state: State, data: Data) -> str:
    form, rows = form_of(state.settings, data), slice(0, DIGITS)
    stack = form.stack(state.done)
    pixels = data.test.inputs(rows)
    shown: list[Grey] = [grey(v.numpy().reshape(data.side), *_range(data)) for v in pixels]
    for depth in range(1, len(stack) + 1):
        back = network.down(
            stack[:depth], network.up(stack[:depth], pixels), state.settings.visible
        )
        shown += [grey(v.numpy().reshape(data.side), *_range(data)) for v in back]
    return (
        "<section><h2>Reconstructions</h2><p>Above: digits of the test. Below, row by row: what the first layer "
        "makes of them and back, then the first two, and so on, after pre-training.</p>"
        f"{image(sheet(shown, len(pixels)), 'reconstructions')}</section>"
    )


def _range(data: Data) -> tuple[float, float]:
    shard = data.train
    return (0.0 - shard.shift) / shard.scale, (255.0 - shard.shift) / shard.scale


def _confusion(chances: npt.NDArray[np.float32], data: Data) -> str:
    counts = np.zeros((data.classes, data.classes), int)
    np.add.at(counts, (data.test.labels, chances.argmax(1)), 1)
    most = max(1, int((counts - np.diag(counts.diagonal())).max()))

    def mistaken(count: int) -> str:
        if not count:
            return ""
        return f'<span style="display:block;background:rgb(217 72 56 / {count / most:.0%})">{count}</span>'

    rows = []
    for label, row in enumerate(counts):
        cells = [f"<b>{n}</b>" if at == label else mistaken(n) for at, n in enumerate(row)]
        total = row.sum()
        wrong = f"{(total - row[label]) / total:.2%}" if total else ""
        rows.append([f"<b>{label}</b>", *cells, wrong])
    head = ["digit", *map(str, range(data.classes)), "wrong"]
    return (
        "<section><h2>Confusion matrix</h2><p>A row is a digit of the test, a column what the network took it for. "
        f"The redder a mistake, the more often it was made.</p>{table(head, rows)}</section>"
    )


def _worst(chances: npt.NDArray[np.float32], data: Data) -> str:
    labels = data.test.labels.astype(int)
    right = chances[np.arange(len(labels)), labels]
    taken = chances.argmax(1)
    order = [int(at) for at in np.argsort(right, kind="stable") if taken[at] != labels[at]][:WORST]
    if not order:
        return "<section><h2>Worst digits</h2><p>All digits of the test are right.</p></section>"
    items = [
        (
            data.test.images[at].reshape(data.side),
            f"{labels[at]}, not {taken[at]} ({chances[at, taken[at]]:.0%})",
        )
        for at in order
    ]
    return (
        "<section><h2>Worst digits</h2><p>The digits whose own class got the least: what each is, what it was "
        f"taken for, and how sure the network was.</p>{captioned(items)}</section>"
    )
