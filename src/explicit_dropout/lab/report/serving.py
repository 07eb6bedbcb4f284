"""A report that follows a sweep: served on this machine alone, made anew when the store changes."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.lab.report.page import Live

HOST = "127.0.0.1"
LOOK_AGAIN_SECONDS = 1.0


class LiveReport:
    """The page of a store as it is now. It is made when asked for, and only if a file has changed since."""

    def __init__(self, root: Path, make: Callable[[Live], str]) -> None:
        self._root, self._make = root, make
        self._lock = threading.Lock()
        self._looked, self._version = -LOOK_AGAIN_SECONDS, ""
        self._page: tuple[str, str, str] | None = None

    def version(self) -> str:
        """Stands for the state of the store; looked up at most once a second."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= LOOK_AGAIN_SECONDS:
                self._looked, self._version = now, state_of(self._root)
            return self._version

    def page(self) -> tuple[str, str]:
        """The page and the nonce of its script."""
        version = self.version()
        with self._lock:
            if self._page is None or self._page[0] != version:
                nonce = secrets.token_urlsafe(12)
                self._page = version, self._make(Live(version, nonce, time.strftime("%H:%M:%S"))), nonce
            return self._page[1], self._page[2]


def state_of(root: Path) -> str:
    """A digest of names, sizes and times of the files of all runs, and of the archives of finished ones."""
    digest = hashlib.sha256()
    for archive in sorted(root.glob("*.zip")):
        with suppress(OSError):
            status = archive.stat()
            digest.update(f"{archive.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    runs = root / "runs"
    for folder in sorted(os.scandir(runs), key=lambda entry: entry.name) if runs.is_dir() else ():
        if not folder.is_dir():
            continue
        for name in ("summary.json", "metrics.jsonl", "error.txt"):
            try:
                status = os.stat(os.path.join(folder.path, name))
            except OSError:  # not there, or not for us to look at: the report says so
                continue
            digest.update(f"{folder.name}/{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


class Server(ThreadingHTTPServer):
    """Listens on this machine only. `serve_forever` until interrupted."""

    daemon_threads = True

    def __init__(self, live: LiveReport, port: int) -> None:
        self.live = live
        if not 0 <= port <= 65535:
            raise InputError("port", "from 0 (any free one) to 65535", port)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InputError("port", "free; --port 0 takes any that is", f"{port}, which is in use") from error
            if error.errno == errno.EACCES:
                raise InputError("port", "one that this user may listen on, such as 8000", port) from error
            raise

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Two pages: the report and its version. Nothing of the file system can be asked for."""

    server: Server

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if not self._for_us():
            self._send(HTTPStatus.FORBIDDEN, "This server answers to its own address only.\n", "text/plain")
        elif path == "/version":
            self._send(HTTPStatus.OK, self.server.live.version(), "text/plain")
        elif path in ("/", "/report.html"):
            try:
                page, nonce = self.server.live.page()
            except ExplicitDropoutError as error:
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n", "text/plain", {"Refresh": "10"})
                return
            policy = (
                f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'nonce-{nonce}'; "
                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            self._send(HTTPStatus.OK, page, "text/html", {"Content-Security-Policy": policy})
        else:
            self._send(HTTPStatus.NOT_FOUND, "Only the report is served here: see /\n", "text/plain")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _for_us(self) -> bool:
        """Whether the request names this machine: a foreign page whose name points here must not read the report."""
        port = self.server.server_address[1]
        return self.headers.get("Host", "") in {f"{HOST}:{port}", f"localhost:{port}"}

    def _send(self, status: HTTPStatus, text: str, kind: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):  # the browser has left
                self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal says where the report is, and stays quiet."""
