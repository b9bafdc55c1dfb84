"""`pliant watch`: a server for the report of one run while it trains, for this machine only.

The server knows two addresses and reads one file, whose path is fixed before it starts: no request can name a path on disk. It
checks the Host header, so that a page from elsewhere cannot read the report by DNS rebinding.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Lock
from typing import Any
from urllib.parse import parse_qs

from pliant.apps import report
from pliant.apps.report import LogError, NothingYet, Run
from pliant.apps.report.tiles import progress
from pliant.core.errors import PliantError

HOST = "127.0.0.1"
_LEAST_WAIT = 2.0  # seconds between two requests of a page
_MOST_REQUESTS = 32  # that are answered at once; a page has one
_REQUEST_SECONDS = 10.0  # for a request to arrive, and for its answer to be taken
_WAIT_FACTOR = 10  # a page waits at least this many times as long as its last answer took


class LivePage:
    """The page of one run. The log is read again when it has grown, and the page is rendered once for all viewers."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._tail = report.Tail(run)
        self.log = self._tail.log
        self._lock = Lock()
        self._stamp, self._run = "", self._read()
        self._rendered = "", ""  # the stamp and the rendered body

    def _read(self) -> Run:
        """The run; one that has logged nothing yet has a name alone."""
        try:
            return self._tail.read()
        except NothingYet:
            return Run(self._tail.name)

    def read(self) -> tuple[str, Run]:
        """The run as it is now, and a stamp that changes with its log."""
        with self._lock:
            try:
                status = self.log.stat()
            except OSError as error:
                if not self._stamp:  # the run has only just begun
                    return "", self._run
                raise LogError(f"{os.fspath(self.log)!r} cannot be read: {error.strerror}.") from error
            stamp = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
            if stamp != self._stamp:
                self._run, self._stamp = self._read(), stamp
            return self._stamp, self._run

    def _body(self, stamp: str, run: Run) -> str:
        with self._lock:
            if self._rendered[0] != stamp:
                self._rendered = stamp, report.body([run])
            return self._rendered[1]

    def page(self) -> str:
        return report.page([self.read()[1]], live=True)

    def news(self, since: str) -> dict[str, str | float]:
        """What a page needs that shows the run as of the stamp `since`."""
        start = time.monotonic()
        try:
            stamp, run = self.read()
        except LogError as error:
            return {"said": str(error), "wait": _LEAST_WAIT}
        now = progress(run)
        said = "finished" if now is None else f"live, {now.said}"
        out: dict[str, str | float] = {"stamp": stamp, "said": said}
        if stamp != since:
            out["main"] = self._body(stamp, run)
        return {**out, "wait": max(_LEAST_WAIT, _WAIT_FACTOR * (time.monotonic() - start))}


class _UntilDeadline(io.RawIOBase):
    """Reads a socket up to a moment, however slowly bytes arrive."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_REQUEST_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request: for the page, or for what is new since a page was made."""

    server: _Server
    server_version, sys_version, timeout = "pliant", "", _REQUEST_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, time.monotonic() + _REQUEST_SECONDS))

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self._names():
            self._answer(403, "text/plain", b"Ask for 127.0.0.1 or localhost.\n")
            return
        path, _, query = self.path.partition("?")
        try:
            if path == "/":
                self._answer(200, "text/html", self.server.live.page().encode(errors="replace"))
            elif path == "/news.json":
                since = parse_qs(query).get("since", [""])[0]
                self._answer(200, "application/json", json.dumps(self.server.live.news(since)).encode())
            else:
                self._answer(404, "text/plain", b"Not here.\n")
        except LogError as error:
            self._answer(503, "text/plain", f"{error}\n".encode(errors="replace"))

    do_HEAD = do_GET

    def _names(self) -> tuple[str, ...]:
        own = self.connection.getsockname()[1]
        return (f"{HOST}:{own}", f"localhost:{own}") + ((HOST, "localhost") if own == 80 else ())

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{report.policy(live=True)}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: the terminal may show a training run."""


class _Server(ThreadingHTTPServer):
    """Serves one page to this machine, to so many requests at once."""

    daemon_threads = True  # an open page does not delay Ctrl-C

    def __init__(self, port: int, live: LivePage) -> None:
        self.live, self._free = live, BoundedSemaphore(_MOST_REQUESTS)
        super().__init__((HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the request, if one is free; a page asks again later."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread began
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed during an answer is not an error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def server(run: str | os.PathLike[str], port: int = 0) -> ThreadingHTTPServer:
    """A server for the page of this run on 127.0.0.1; port 0 picks a free port. Call its `serve_forever`."""
    live = LivePage(run)
    try:
        return _Server(port, live)
    except OSError as error:
        raise PliantError(f"cannot use port {port} on {HOST}: {error.strerror}. Leave out --port to use a free one.") from error


def address(server: ThreadingHTTPServer) -> str:
    return f"http://{HOST}:{server.server_address[1]}/"
