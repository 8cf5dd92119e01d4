# SPDX-License-Identifier: Apache-2.0
"""The agent's metrics over HTTP, for Prometheus (`nicps join --metrics`).

Threads of their own talk to clients. The loop only makes a status for them, as for `nicps status`, and at most a few
times a second. There is no authentication: everybody who can connect may read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from nicps.errors import EnvironmentProblem, UsageProblem
from nicps.session.messages import Status

LOOPBACK = "127.0.0.1"
_MOST_CLIENTS = 8  # at a time; further ones are closed at once
_REST_S = 0.02  # between two clients: they may not keep the interpreter from the loop
_REQUEST_S = 5.0  # from connecting to the end of the answer
_FRESH_S = 0.2  # a status serves all requests of this time
_ANSWER_S = 2.0


class Exporter:
    """The address is bound at once; `serve` answers at it.

    Args:
        address: [HOST]:PORT; an IPv6 address in brackets. Without HOST, 127.0.0.1.
        watch, unwatch: of the loop.

    Attributes: `url`, where the metrics are.

    Raises:
        UsageProblem: the address is not valid.
        EnvironmentProblem: the address is taken, or not this host's.
        ModuleNotFoundError: prometheus_client is not installed (`nicps.extras`).
    """

    def __init__(
        self,
        address: str,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        host, port = split_address(address)
        import prometheus_client  # noqa: F401  if it is missing, nothing is begun

        self._watch, self._unwatch = watch, unwatch
        self._status: Callable[[], Status] | None = None
        self._asked: queue.SimpleQueue[Future[Status]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._latest: tuple[float, Status] | None = None
        try:
            self._server = _Server(host, port, self._answer)
        except OSError as error:
            why = error.strerror or str(error)
            raise EnvironmentProblem(
                f"cannot serve metrics at {address}: {why}; give --metrics another [HOST]:PORT"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def serve(self, status: Callable[[], Status]) -> None:
        """Answer from now on with the result of `status`, which is called in the loop."""
        self._status = status
        self._watch(self._bell, self._make_status)
        self._thread.start()

    def close(self) -> None:
        """Stop, and cut off the clients that are being answered."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._unwatch(self._bell)
        os.close(self._bell)

    def _make_status(self) -> None:
        """In the loop: make a status for all requests that wait."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        assert self._status is not None, "nobody asks before `serve`"
        while not self._asked.empty():
            asked = self._asked.get()
            try:
                asked.set_result(self._status())
            except Exception as error:  # the thread reports the error, and the loop goes on
                asked.set_exception(error)

    def _fetch(self) -> Status:
        """In a thread: wait for a status that is hardly older than the request.

        Raises:
            concurrent.futures.TimeoutError: the loop is busy.
        """
        with self._lock:
            if self._latest is None or time.monotonic() > self._latest[0] + _FRESH_S:
                asked: Future[Status] = Future()
                self._asked.put(asked)
                os.eventfd_write(self._bell, 1)
                self._latest = time.monotonic(), asked.result(_ANSWER_S)
            return self._latest[1]

    def _answer(self, environment: dict[str, Any], start: Any) -> Iterable[bytes]:
        """Answer one request (WSGI); prometheus_client does the rest."""
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from nicps.agent.families import StatusCollector

        try:
            status = self._fetch()
        except NoAnswer:
            start("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the agent does not answer\n"]
        registry = CollectorRegistry()
        registry.register(StatusCollector(status))
        answer: Iterable[bytes] = make_wsgi_app(registry, disable_compression=True)(
            environment, start
        )
        return answer


def split_address(address: str) -> tuple[str, int]:
    """Host and port of [HOST]:PORT.

    Raises:
        UsageProblem: the address is not valid.
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]*)):([0-9]{1,5})", address)
    if found is None or int(found[3]) > 65535:
        raise UsageProblem(
            f"--metrics takes [HOST]:PORT, such as {LOOPBACK}:9400 or [::1]:9400, not {address!r}"
        )
    return found[1] or found[2] or LOOPBACK, int(found[3])


class _Handler(WSGIRequestHandler):
    """Write nothing to the agent's log, since any client could fill it."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each client; there are few clients at a time, each for a short time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, application: Any) -> None:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self._until: dict[socket.socket, float] = {}
        super().__init__((str(where[0]), port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Do not ask a name server for this host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the client a thread, or close the connection if there are too many."""
        if len(self._until) >= _MOST_CLIENTS:
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + _REQUEST_S
        super().process_request(request, client_address)
        time.sleep(_REST_S)

    def shutdown_request(self, request: Any) -> None:
        """The client is answered, or closed."""
        self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off clients that take too long. Their threads then read an end, or cannot write."""
        now = time.monotonic()
        for request, until in list(self._until.items()):
            if now > until:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that goes away."""
