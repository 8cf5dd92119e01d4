# SPDX-License-Identifier: Apache-2.0
"""The options of `nicps dbn`, which starts `python -m trainer.dbn` with them; spark-submit takes the same."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nicps.errors import JobFailed, NicpsError, UsageProblem
from nicps.extras import missing_extra
from nicps.usage import OneLineParser
from trainer import startup
from trainer.dbn import signals

DESCRIPTION = """\
Train a deep belief network on MNIST by iterative reduce: a master hands out weights, workers pass over
their split of the data, the master averages; layer by layer, then with labels. docs/dbn.md explains the
settings."""

LOCAL = "local"  # the master that is no Spark

#: Of the settings (trainer/dbn/settings.py) in groups: the option's type, and what it is.
Options = dict[str, tuple[Callable[[str], Any] | Sequence[str], str]]


def _sizes(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"numbers with commas between them, not {value!r}"
        ) from None


NETWORK: Options = {
    "workers": (int, "splits of the data, each with a worker"),
    "layers": (_sizes, "hidden units, from below"),
    "epochs": (int, "passes over the data for each layer; 0: no pre-training"),
    "finetune": (int, "passes over the data with labels"),
    "batch": (int, "samples of a worker's step"),
    "samples": (int, "take the first so many only"),
    "held-out": (int, "of them the last so many are not trained on: they judge the settings"),
    "seed": (int, "of all random numbers"),
}
REDUCE: Options = {
    "averages": (int, "means of all workers in a pass"),
    "master-momentum": (float, "of the sequence of means; 0: plain means (0.5; of one worker 0)"),
    "velocity": (("average", "reset"), "of the workers' steps, when a mean is made"),
}
PRETRAIN: Options = {
    "visible": (("binary", "gaussian"), "units of the first layer"),
    "cd": (int, "steps of contrastive divergence"),
    "pretrain-lr": (float, "learning rate"),
    "pretrain-momentum": (float, "of a worker's steps; at most 0.5 in a layer's first 5 epochs"),
    "pretrain-decay": (float, "weight decay"),
}
TUNE: Options = {
    "optimizer": (("sgd", "cg"), "gradient descent, or conjugate gradients (--batch 1000)"),
    "lr": (float, "learning rate"),
    "momentum": (float, "of a worker's steps"),
    "schedule": (("constant", "linear", "cosine"), "of the learning rate"),
    "weight-decay": (float, "weight decay"),
    "dropout": (float, "share of hidden units left out"),
    "input-dropout": (float, "share of pixels left out"),
    "max-norm": (float, "of the weights into a unit (none)"),
    "head-epochs": (
        int,
        "first epochs in which only the top layer learns: at most a quarter of --finetune, and 0 with --epochs 0; "
        "the report has the number in force",
    ),
}


def parser() -> argparse.ArgumentParser:
    """Settings that are not given are not in what it returns."""
    from trainer.dbn.settings import Settings

    made = OneLineParser(prog="nicps dbn", description=DESCRIPTION)
    made.add_argument(
        "--data",
        default=os.environ.get("NICPS_DATA") or None,
        metavar="DIR",
        help="folder with MNIST's four IDX files, or with mnist/ ($NICPS_DATA)",
    )
    made.add_argument(
        "--master",
        metavar="WHERE",
        help="where workers run: local (default), threads of this process without Spark; or Spark's "
        "master: local[N], local[*], spark://HOST:PORT or yarn",
    )
    made.add_argument(
        "--reduce",
        choices=("spark", "nicps"),
        help="what adds the weights: Spark's driver (default), or the kernels of the executors' hosts, each of which "
        "runs an agent",
    )
    made.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where runs are kept (%(default)s)",
    )
    made.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this folder"
    )
    made.add_argument("--json", action="store_true", help="the result as one JSON line on stdout")
    made.add_argument("--verbose", action="store_true", help="show the traceback of an error")
    defaults = Settings()
    groups = {
        "the network": NETWORK,
        "iterative reduce": REDUCE,
        "pre-training": PRETRAIN,
        "fine-tuning": TUNE,
    }
    for title, options in groups.items():
        group = made.add_argument_group(title)
        for name, (kind, words) in options.items():
            value = getattr(defaults, name.replace("-", "_"))
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            group.add_argument(
                f"--{name}",
                default=argparse.SUPPRESS,
                type=kind if callable(kind) else str,
                choices=None if callable(kind) else kind,
                metavar="N"
                if kind is int
                else "N,N"
                if kind is _sizes
                else "X"
                if kind is float
                else None,
                help=words if value is None else f"{words} ({shown})",
            )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: those of `nicps` (nicps/cli/__init__.py)."""
    options = parser().parse_args(arguments)
    try:
        with signals.noted():
            startup.import_torch()
            return _run(options)
    except signals.Stopped as stopped:
        return stopped.exit_code
    except NicpsError as error:
        return _fail(error, str(error), error.exit_code, options.verbose)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the result is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NicpsError.exit_code
    except Exception as error:
        missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            return _fail(error, str(missing), missing.exit_code, options.verbose)
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            words = "there is too little memory: take smaller --layers, or less --workers"
            return _fail(error, words, JobFailed.exit_code, options.verbose)
        words = f"unexpected {type(error).__name__}: {error} (--verbose shows where)"
        return _fail(error, words, NicpsError.exit_code, options.verbose)


def _fail(error: BaseException, words: str, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    print(f"nicps: error: {' '.join(words.split())}", file=sys.stderr)
    return code


def _say(words: str) -> None:
    print(f"nicps: {words}", file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> int:
    import trainer.dbn.model  # noqa: F401  what it lacks is told before hours of training
    from trainer.dbn import checkpoint, shards
    from trainer.dbn.master import form_of, train
    from trainer.dbn.progress import Progress, duration
    from trainer.errors import SettingError

    state = _state(options)
    place = options.data or state.place
    data = shards.read(place, state.settings)
    if state.data not in ("", data.digest):
        raise SettingError(
            f"the data in {place} are not those that {options.resume} was trained with"
        )
    state.data, state.place = data.digest, os.path.abspath(str(place))
    folder = (
        options.resume
        or options.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-dbn-{secrets.token_hex(2)}"
    )
    reducer, master = _reducer(options, shards.deal(data.train, state.settings))
    progress = Progress(state.settings, form_of(state.settings, data), _say)
    kept = len(state.rows)

    def after_epoch(now: checkpoint.State) -> None:
        nonlocal kept
        checkpoint.save(now, folder)
        kept = len(now.rows)
        progress.epoch(now.rows[-1])
        signals.raise_received()

    try:
        checkpoint.make(folder)
        settings = state.settings
        if kept and kept == settings.epochs * len(settings.layers) + settings.finetune:
            _say(f"{folder.name} is done already: no epoch is left to train")
        else:
            _say(f"{folder.name}: {settings.workers} workers, {_place(master)}")
        found = train(state, data, reducer, after_epoch)
        result = _result(folder, state, data, found, master, options.reduce or "spark")
    except BaseException:
        if (folder / checkpoint.NAME).is_file():
            epochs, those = ("epoch is", "it") if kept == 1 else ("epochs are", "them")
            _say(f"{kept} {epochs} kept: `nicps dbn --resume {folder}` goes on after {those}")
        else:
            checkpoint.unmake(folder)
        raise
    finally:
        reducer.close()
    if options.json:
        print(json.dumps(result), flush=True)
    else:
        shown = {
            **result,
            **{k: f"{v:.2%}" for k, v in result.items() if k.endswith("_error")},
            "seconds": duration(result["seconds"]),
        }
        width = max(map(len, shown))
        for key, value in shown.items():
            print(f"{key.replace('_', ' '):<{width}}  {value}")
    return 0


def _state(options: argparse.Namespace) -> Any:
    """A new run's, or that of the run to go on with, whose settings hold."""
    from trainer.dbn.checkpoint import State, load
    from trainer.dbn.settings import Settings

    names = Settings.__dataclass_fields__
    given = {name: value for name, value in vars(options).items() if name in names}
    if options.resume is None:
        return State(Settings(**given), data="")
    state = load(options.resume)
    for name, value in given.items():
        if (kept := getattr(state.settings, name)) != value:
            said, was = (
                ",".join(map(str, v)) if isinstance(v, tuple) else v for v in (value, kept)
            )
            raise UsageProblem(
                f"--{name.replace('_', '-')} {said}: {options.resume} was begun with {was}; a run keeps its settings"
            )
    return state


def _reducer(options: argparse.Namespace, splits: Any) -> tuple[Any, str]:
    """What runs the workers, and the name of the master."""
    from trainer.dbn.cluster import connect, submitted

    if options.master == LOCAL or (options.master is None and not submitted()):
        if options.reduce is not None:
            raise UsageProblem(f"--reduce {options.reduce} needs Spark: name its --master")
        from trainer.dbn.reduce_local import LocalReducer

        return LocalReducer(splits), LOCAL
    context = connect(options.master)
    if options.reduce == "nicps":
        from trainer.dbn.reduce_nicps import NicpsReducer

        return NicpsReducer(context, splits), context.master
    from trainer.dbn.reduce_spark import SparkReducer

    return SparkReducer(context, splits), context.master


def _place(master: str) -> str:
    return "this machine, without Spark" if master == LOCAL else f"Spark on {master}"


def _result(
    folder: Path, state: Any, data: Any, found: Any, master: str, reduce: str
) -> dict[str, Any]:
    """Write the model, the report and result.json; what the last one holds."""
    from trainer.dbn import checkpoint, model
    from trainer.dbn.master import form_of, share_wrong
    from trainer.dbn.report import write_report
    from trainer.errors import JobError

    form, settings = form_of(state.settings, data), state.settings
    try:
        kept = model.Model(form.classifier(found), data.train.shift, data.train.scale)
        model.write(kept, folder)
        report = write_report(folder, state, data, found, _place(master))
        result = {
            "test_error": share_wrong(form, found, data.test),
            **(
                {"validation_error": share_wrong(form, found, data.held_out)}
                if data.held_out is not None
                else {}
            ),
            "workers": settings.workers,
            "master": master,
            "reduce": "local" if master == LOCAL else reduce,
            "layers": list(settings.layers),
            "epochs": settings.epochs,
            "finetune": settings.finetune,
            "seed": settings.seed,
            "seconds": round(state.seconds, 3),
            "weights_sha256": checkpoint.digest([found]),
            "report": str(report.absolute()),
        }
        text = json.dumps({**result, "history": state.rows}, indent=1) + "\n"
        (folder / "result.json").write_text(text)
    except OSError as error:
        raise JobError(f"cannot write to {folder}: {error.strerror}") from None
    return result
