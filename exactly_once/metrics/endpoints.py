"""Endpoints: ``/livez``, ``/readyz`` and ``/metrics`` over HTTP, for a process that serves nothing else.

    with ExactlyOnceConsumer(..., metrics=metrics) as consumer, Endpoints(consumer, port=9400, render=metrics.render):
        ...

An application with a web server of its own needs none of this: ``consumer.health()`` is all there is to it.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, Self

from exactly_once._log import about, named
from exactly_once.errors import ConfigurationError

from .health import Health

logger = logging.getLogger(__name__)

# Given an Accept header, returns content type and text of the metrics: ``PrometheusMetrics.render``.
Render = Callable[[str], tuple[str, bytes]]

# How long a client may take to send its request: each has a thread until then.
_CLIENT_SECONDS = 5.0


class HasHealth(Protocol):
    """What is asked of a consumer here."""

    def health(self) -> Health:
        """Return its state at this moment."""
        ...


class Endpoints:
    """Serves from threads of its own until :meth:`close`; a process with several consumers is as well as all of them.

    ``host`` is this machine only by default: in a container pass ``host="0.0.0.0"``, or ``"::"`` with IPv6.
    Anybody who reaches the port reads names of topics and texts of errors; there is no login.

    :raises OSError: when the port is taken.
    """

    def __init__(self, *consumers: HasHealth, port: int, host: str = "127.0.0.1", render: Render | None = None) -> None:
        if not consumers:
            raise ConfigurationError("Endpoints needs a consumer: Endpoints(consumer, port=9400)")
        self._consumers = consumers
        self._render = render
        self._server = _Server((host, port), self._answer)
        # The port; where 0 was given, the one that was free.
        self.port: int = self._server.server_address[1]
        # It looks ten times a second whether it is to end: `close` waits for that.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="exactly_once-endpoints", daemon=True
        )
        self._thread.start()
        logger.info("serving /livez, /readyz and /metrics on %s:%s", host, self.port, extra=about("serving"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics" and self._render is not None:
            return HTTPStatus.OK, *self._render(accept)
        if path not in ("/livez", "/readyz"):
            known = "/livez, /readyz" + (", /metrics" if self._render is not None else "")
            return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"there are {known}\n".encode()
        found = [consumer.health() for consumer in self._consumers]
        is_well = all(health.is_alive if path == "/livez" else health.is_ready for health in found)
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", json.dumps([asdict(health) for health in found], indent=1).encode() + b"\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that keeps its connection open must not keep the process

    def __init__(self, address: tuple[str, int], answer: Callable[[str, str], tuple[HTTPStatus, str, bytes]]) -> None:
        self.answer = answer
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log instead of printing; a client that goes away is no error of ours."""
        logger.debug("a request from %s failed: %r", client_address, sys.exception(), extra=about("request_failed"))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS
    server_version = "exactly-once"
    sys_version = ""  # which Python this is is nobody's business

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            status, content_type, text = self.server.answer(path, self.headers.get("Accept", ""))
        except Exception as error:
            logger.exception("no answer to %s: %s", path, named(error), extra=about("answer_failed"))
            status, content_type = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8"
            text = f"{named(error)}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Keep probes, one every few seconds, out of the log."""
