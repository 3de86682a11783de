"""The page of runs that go on, served on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import click

from accelerate.core.errors import SettingError
from accelerate.report.page import page_data, render_page
from accelerate.report.run_reader import RunReader

REFRESH_SECONDS = 2.0
# A page that takes longer to make than QUICK seconds is made anew after PAUSE times as long: the rest of the
# core is for the run on the same machine.
QUICK, PAUSE = 0.1, 20


class _RunPages:
    """The page of some runs and its data; made anew only where something was appended."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._reader, self._lock = RunReader(paths), threading.Lock()
        self._data, self._version, self._next = "", -1, 0.0

    def data(self) -> str:
        """Return the data of the page, as of now or, of a long run, as of some seconds ago."""
        with self._lock:  # each request has a thread
            start = time.monotonic()
            if start < self._next:
                return self._data
            runs = self._reader.update()
            if self._version != self._reader.version:
                self._data, self._version = page_data(runs), self._reader.version
            took = time.monotonic() - start
            self._next = start + PAUSE * took if took > QUICK else 0.0
            return self._data

    def render(self) -> str:
        """Return the page."""
        with self._lock:
            return render_page(self._reader.update(), refresh_seconds=REFRESH_SECONDS)


def make_server(runs: Sequence[str], port: int) -> ThreadingHTTPServer:
    """Return a server of the page on the loopback interface; ``serve_forever`` runs it.

    Args:
        runs: files and folders; a request reads what was appended since the one before.
        port: 0 is a free one.

    Raises:
        SettingError: the port is in use.
    """

    pages = _RunPages(runs)

    class _Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the page at ``/``, with its data at ``/data.json``."""
            # Another page of the browser may reach this port under a name of its own (DNS rebinding).
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host not in ("localhost", "127.0.0.1"):
                self.send_error(403)
                return
            answers = {"/": ("text/html", pages.render), "/data.json": ("application/json", pages.data)}
            if self.path not in answers:
                self.send_error(404)
                return
            kind, answer = answers[self.path]
            try:
                body = answer().encode()
            except SettingError as error:  # the folder was removed while the page was open
                self.send_error(503, str(error).splitlines()[0])
                return
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing for a request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except OSError as error:
        raise SettingError(
            f"cannot serve on port {port}", why=error.strerror or str(error), fix="give another --port"
        ) from error


def serve_page(runs: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        SettingError: a run cannot be read, or the port is in use.
    """
    RunReader(runs).update()
    with make_server(runs, port) as server:
        click.echo(f"http://127.0.0.1:{server.server_address[1]}/ shows the runs; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("")
