# SPDX-License-Identifier: Apache-2.0
"""A cluster of Spark: how it is reached, and what it says of what has failed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nicps.errors import EnvironmentProblem, NetworkProblem, explain
from nicps.extras import require_extra
from nicps.programs import find_program, require_programs
from trainer.dbn import signals
from trainer.dbn.managers import LOCAL, check_master
from trainer.errors import JobError

if TYPE_CHECKING:
    from pyspark import SparkContext

OLDEST_JAVA = 17  # Spark 4 needs it
EXECUTORS_S = 60.0  # for the first executor to come, and for another one when none is left
LOOK_S = 2.0  # between two looks whether there are executors
RAISED = re.compile(r"(\w+\.)+[A-Z]\w*: |\w*(Error|Exception|Interrupt): ")


def failure(error: Exception) -> Exception:
    """What Spark says of a job that has failed, in one line: the worker's own error, if there is one."""
    from py4j.protocol import Py4JError, Py4JJavaError

    if isinstance(error, ConnectionError | Py4JError) and not isinstance(error, Py4JJavaError):
        return EnvironmentProblem(
            "the Java process of Spark's driver, on this host, has ended: see whether memory was short, and go on "
            "with --resume"
        )
    lines = [line.strip() for line in str(error).splitlines()]
    raised = [line for line in lines if RAISED.match(line)]
    own = [line for line in raised if not line.startswith(("py4j.", "org.", "java."))]
    said = next(iter(own or raised or lines), repr(error))
    if "No module named" in said:
        return EnvironmentProblem(
            f"a Spark executor has another Python: {said}; install nicps[spark] on its host, and name the "
            "interpreter in PYSPARK_PYTHON"
        )
    for kind in (JobError, NetworkProblem):
        if said.startswith(name := f"{kind.__module__}.{kind.__name__}: "):
            return kind(said.removeprefix(name))
    return JobError(f"Spark: {said}")


def submitted() -> bool:
    """Whether spark-submit has started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def connect(master: str | None) -> SparkContext:
    """A context on that cluster; None: on that of spark-submit, which has started this process.

    Raises:
        UsageProblem: the master's name has another form.
        EnvironmentProblem: Java, pyspark or YARN's configuration is missing.
        NetworkProblem: no manager answers, or it gives no executor.
    """
    here = None if master is None else check_master(master)
    require_extra("pyspark")
    if not submitted():
        check_java()
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if submitted():
        SparkContext._ensure_initialized()  # only then a configuration holds what spark-submit was told
    conf = SparkConf().setIfMissing("spark.app.name", "nicps dbn")
    if master is not None:
        conf.setMaster(master)
    for key, value in {
        "spark.driver.memory": "2g",
        "spark.driver.maxResultSize": "0",
        "spark.broadcast.compress": "false",  # weights are noise
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        conf.setIfMissing(key, value)
    if here is not None:
        conf.setIfMissing("spark.driver.host", here)
    if LOCAL.fullmatch(str(conf.get("spark.master"))):
        conf.setIfMissing("spark.driver.bindAddress", "127.0.0.1")
        conf.setIfMissing("spark.driver.host", "127.0.0.1")
        conf.setIfMissing("spark.ui.enabled", "false")
    where = conf.get("spark.master")
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with signals.held():  # a Java process whose start is interrupted would stay for ever
            SparkContext._ensure_initialized(conf=conf)
        context = SparkContext(conf=conf)
    except Exception as error:
        raise NetworkProblem(f"Spark does not start on {where}: {failure(error)}") from error
    if threading.current_thread() is threading.main_thread():
        # Spark's own handler asks the JVM to cancel, on the connection on which the interrupted call waits.
        signal.signal(signal.SIGINT, on_interrupt)
    logging.getLogger().addFilter(_is_no_interrupt)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # its errors are raised, too
    if (server := getattr(context, "_accumulatorServer", None)) is not None:
        server.handle_error = lambda *_: None  # it prints a traceback when the Java process ends
    try:
        await_executor(context)
    except Py4JError as error:
        raise NetworkProblem(
            f"no Spark master answers at {where}: Spark has given up; name the port of a standalone master, "
            "not that of its web page"
        ) from error
    except BaseException:
        disconnect(context)
        raise
    return context


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Py4J logs an interrupt of a call as an error, with a traceback."""
    return record.exc_info is None or not isinstance(record.exc_info[1], KeyboardInterrupt)


def disconnect(context: SparkContext) -> None:
    """End the application. Spark logs an error for each task that is under way then: nobody needs to read them."""
    with contextlib.suppress(Exception):  # it may have stopped by itself
        context.setLogLevel("OFF")
    with contextlib.suppress(OSError):  # so may its Java process
        context.stop()


def check_java() -> None:
    """See to it that there is a Java runtime that Spark can use.

    Raises:
        EnvironmentProblem: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else find_program("java")
    if java is None:
        require_programs("java", purpose="Spark")
    assert java is not None
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        where = f" (JAVA_HOME is {home})" if home else ""
        raise EnvironmentProblem(f"{explain('start Java', error)}{where}") from None
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    if found is None or int(found[1]) < OLDEST_JAVA:
        version = found[1] if found else "not known"
        raise EnvironmentProblem(
            f"Spark needs Java {OLDEST_JAVA} or newer, and the version of {java} is {version}: "
            "install openjdk-17-jre-headless"
        )


def await_executor(context: SparkContext) -> None:
    """Wait until the cluster has given a first executor.

    Raises:
        NetworkProblem: none comes.
    """
    if LOCAL.fullmatch(context.master):
        return
    deadline = time.monotonic() + EXECUTORS_S
    while not executors(context):
        if time.monotonic() > deadline:
            raise NetworkProblem(
                f"{context.master} gives no executor within {EXECUTORS_S:.0f} s: "
                "start a worker with free cores and memory"
            )
        time.sleep(0.2)


def executors(context: SparkContext) -> int:
    """How many executors there are now."""
    table = context._jsc.sc().getExecutorMemoryStatus()  # type: ignore[union-attr]
    return int(table.size()) - 1  # the driver is in it, too


@contextlib.contextmanager
def watched(context: SparkContext) -> Iterator[None]:
    """Jobs of Spark are under way meanwhile. Spark itself waits for ever for an executor.

    Raises:
        NetworkProblem: there is no executor any more, and none comes.
        JobError, EnvironmentProblem, NetworkProblem: what `failure` makes of an error of Spark's.
        Stopped: a signal that ends the run has come, whatever Spark has made of it.
    """
    if LOCAL.fullmatch(context.master):
        watch = None
    else:
        watch = Watch(context)
        watch.start()
    try:
        yield
    except Exception as error:
        signals.raise_received()
        if watch is not None and watch.lost:
            raise NetworkProblem(
                f"{context.master} has had no executor for {EXECUTORS_S:.0f} s: start its master and a worker, "
                "and go on with --resume"
            ) from error
        raise failure(error) from error
    finally:
        if watch is not None:
            watch.stop()


class Watch(threading.Thread):
    """Says when no executor is left, and cancels all jobs if none comes.

    Attributes: `lost`, whether it has cancelled them.
    """

    def __init__(self, context: SparkContext) -> None:
        super().__init__(daemon=True)
        self._context = context
        self._ended = threading.Event()
        self.lost = False

    def run(self) -> None:
        """Until it is stopped."""
        since: float | None = None  # when the last executor had gone
        while not self._ended.wait(LOOK_S):
            try:
                there = executors(self._context)
            except Exception:  # Spark itself has ended, which the job's own error says
                return
            if there:
                since = None
            elif since is None:
                since = time.monotonic()
                said = (
                    "no executor is left; one that comes goes on, and Ctrl-C keeps the whole epochs"
                )
                print(f"nicps: {said}", file=sys.stderr, flush=True)
            elif time.monotonic() - since > EXECUTORS_S:
                self.lost = True
                self._context.cancelAllJobs()
                return

    def stop(self) -> None:
        """It asks Spark nothing any more."""
        self._ended.set()
        self.join()
