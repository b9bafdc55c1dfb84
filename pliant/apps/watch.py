"""`pliant watch`: the report of one run, live, for this machine only.

The server knows two addresses and opens one file, which was named before it started: no request has a path in it that is
looked up on disk. It answers only to its own name, so that no page from elsewhere can read it by way of a borrowed one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from pliant.apps import report
from pliant.apps.report import LogError, Run
from pliant.core.errors import PliantError

HOST = "127.0.0.1"
_LEAST_WAIT = 2.0  # seconds between two questions of a page
_REST = 10  # times as long as an answer took to make, a page waits with its next question


class Live:
    """One run's log, read on when it has grown, and drawn once for all who look."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._tail = report.Tail(run)
        self.log = self._tail.log
        self._lock = Lock()
        self._stamp, self._run = "", self._tail.read()
        self._drawn = "", ""  # the stamp of what was drawn, and it

    def read(self) -> tuple[str, Run]:
        """The run as it is now, and a stamp that changes with it."""
        with self._lock:
            try:
                status = self.log.stat()
            except OSError as error:
                raise LogError(f"{os.fspath(self.log)!r} cannot be read: {error.strerror}.") from error
            stamp = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
            if stamp != self._stamp:
                self._run, self._stamp = self._tail.read(), stamp
            return self._stamp, self._run

    def _body(self, stamp: str, run: Run) -> str:
        with self._lock:
            if self._drawn[0] != stamp:
                self._drawn = stamp, report.body([run])
            return self._drawn[1]

    def page(self) -> str:
        return report.page([self.read()[1]], live=True)

    def news(self, since: str) -> dict[str, str | float]:
        """What a page needs that knows the run as of the stamp `since`."""
        start = time.monotonic()
        try:
            stamp, run = self.read()
        except LogError as error:
            return {"said": str(error), "wait": _LEAST_WAIT}
        said = "finished" if run.ended else f"live, step {run.steps[-1].number}" if run.steps else "live"
        out: dict[str, str | float] = {"stamp": stamp, "said": said}
        if stamp != since:
            out["main"] = self._body(stamp, run)
        return {**out, "wait": max(_LEAST_WAIT, _REST * (time.monotonic() - start))}


def server(run: str | os.PathLike[str], port: int = 0) -> ThreadingHTTPServer:
    """A server of this run's page on 127.0.0.1; port 0 takes one that is free. `serve_forever` it."""
    live = Live(run)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "pliant", "", 30

        def do_GET(self) -> None:
            if self.headers.get("Host", "") not in self._names():
                self._answer(403, "text/plain", b"Ask for 127.0.0.1 or localhost.\n")
                return
            path, _, query = self.path.partition("?")
            try:
                if path == "/":
                    self._answer(200, "text/html", live.page().encode())
                elif path == "/news.json":
                    since = parse_qs(query).get("since", [""])[0]
                    self._answer(200, "application/json", json.dumps(live.news(since)).encode())
                else:
                    self._answer(404, "text/plain", b"Not here.\n")
            except LogError as error:
                self._answer(503, "text/plain", f"{error}\n".encode())

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
            """A terminal that shows training has no room for requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True  # a page that is still open does not hold up Ctrl-C

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A page that was closed while it was answered is no error."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

    try:
        return Server((HOST, port), Handler)
    except OSError as error:
        raise PliantError(
            f"port {port} cannot be had on {HOST}: {error.strerror}. Leave --port out to take a free one."
        ) from error


def address(of: ThreadingHTTPServer) -> str:
    return f"http://{HOST}:{of.server_address[1]}/"
