"""A small object store with the manners of the large ones, and a driver for it: ``objects://host:port/bucket/..``.

Objects have names and no folders; nothing can be renamed; a PUT shows the whole object or none, and an upload
in parts shows nothing before it is completed. The server can be told to go wrong at its n-th change. The
driver knows nothing that an fsspec driver of a real store does not offer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


@dataclass
class Objects:
    """What the server holds, and how it fails.

    Attributes:
        url: of its bucket.
        stored: content by name, with the bucket.
        log: requests, as ``"GET bucket/name"``.
        changes: PUTs and DELETEs so far.
        at: the change that goes wrong, from 1; 0 for none.
        how: ``"refused"``: that one is; ``"gone"``: that one and all requests later are; ``"unanswered"``: it
            is done, but the answer is an error; ``"forbidden"``: that one, for lack of rights.
    """

    url: str = ""
    stored: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    changes: int = 0
    at: int = 0
    how: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, at: int, how: str) -> None:
        """Sets what goes wrong from now on."""
        with self.lock:
            self.changes, self.at, self.how = 0, at, how

    def judged(self, changes: bool) -> tuple[bool, int]:
        """(whether the request is done, status of the answer if it is not the usual one)."""
        self.changes += changes
        if self.how == "gone" and 0 < self.at <= self.changes:
            return False, 503
        if not changes or self.changes != self.at:
            return True, 0
        return self.how == "unanswered", 403 if self.how == "forbidden" else 503

    def below(self, prefix: str) -> dict[str, int]:
        """Names that begin with ``prefix``, with the sizes."""
        return {name: len(data) for name, data in sorted(self.stored.items()) if name.startswith(prefix)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the screen."""

    def _serve(self) -> None:
        objects: Objects = self.server.objects  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        name, prefix = (
            unquote(parts.path).strip("/"),
            parse_qs(parts.query, keep_blank_values=True).get("below", [None])[0],
        )
        with objects.lock:
            objects.log.append(f"{self.command} {name}")
            done, wrong = objects.judged(self.command in ("PUT", "DELETE"))
            status, answer = self._done(objects, name, prefix, body) if done else (wrong, b"")
        status = wrong or status
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _done(self, objects: Objects, name: str, prefix: str | None, body: bytes) -> tuple[int, bytes]:
        if name.partition("/")[0] != "bucket":
            return 404, b""
        if prefix is not None:
            return 200, json.dumps(objects.below(f"bucket/{prefix}")).encode()
        if self.command == "PUT":
            objects.stored[name] = body
            return 200, b""
        if self.command == "DELETE":
            objects.stored.pop(name, None)  # deleting what is not there is no error in such stores
            return 204, b""
        return (200, objects.stored[name]) if name in objects.stored else (404, b"")

    # The names that http.server looks for.
    do_GET = do_PUT = do_DELETE = _serve  # noqa: N815


@contextlib.contextmanager
def serving() -> Generator[Objects]:
    """A server of this process, for it and its ranks."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    objects = Objects(f"objects://127.0.0.1:{server.server_port}/bucket")
    server.objects = objects  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield objects
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class ServerError(Exception):
    """The store answers with an error; as in many drivers, no kind of OSError."""


class _File(AbstractBufferedFile):
    """A file that is written in parts; only its end makes an object of them."""

    fs: ObjectFileSystem
    abandoned = False

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        assert not self.abandoned, "a file that was given up is completed"
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.ask("PUT", self.path, b"".join(self.parts))
        return True

    def discard(self) -> None:
        """Gives up."""
        self.abandoned = True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.ask("GET", self.path)[start:end]


class ObjectFileSystem(AbstractFileSystem):
    """The driver."""

    protocol = "objects"

    def __init__(self, address: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.address = address
        self._listed: dict[str, dict[str, int]] = {}  # drivers keep listings until they are told not to

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        if path.startswith("objects://"):
            path = path.removeprefix("objects://").partition("/")[2]
        return path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"address": path.removeprefix("objects://").partition("/")[0]}

    def ask(self, method: str, name: str, body: bytes | None = None, below: str | None = None) -> bytes:
        """One request."""
        connection = http.client.HTTPConnection(self.address, timeout=20)
        try:
            query = f"?below={quote(below, safe='')}" if below is not None else ""
            connection.request(method, f"/{quote(name)}{query}", body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(name)
        if answer.status == 403:
            raise PermissionError(f"AccessDenied: {name}")
        if answer.status >= 300:
            raise ServerError(f"the store answers {answer.status} to {method} {name}")
        return content

    def _below(self, path: str) -> dict[str, int]:
        path = self._strip_protocol(path)
        bucket, _, key = path.partition("/")
        if path not in self._listed:
            answer = self.ask("GET", bucket, below=f"{key}/" if key else "")
            self._listed[path] = json.loads(answer)
        return self._listed[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forgets listings."""
        self._listed.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Names up to the next slash."""
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        for name, size in self._below(path).items():
            inside, slash, _ = name[len(path) + 1 :].partition("/")
            whole = f"{path}/{inside}"
            found[whole] = {
                "name": whole,
                "size": 0 if slash else size,
                "type": "directory" if slash else "file",
            }
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def find(
        self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        """All below, as one listing."""
        files = {n: {"name": n, "size": s, "type": "file"} for n, s in self._below(path).items()}
        return files if detail else list(files)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """One object or the beginning of names."""
        path = self._strip_protocol(path)
        self.invalidate_cache()
        above = self._below(path.rpartition("/")[0])
        if path in above:
            return {"name": path, "size": above[path], "type": "file"}
        if self._below(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> _File:
        return _File(self, path, mode, block_size or "default")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        """The object."""
        return self.ask("GET", self._strip_protocol(path))[start:end]

    def get_file(self, rpath: str, lpath: Any, **kwargs: Any) -> None:
        """The object, as a file."""
        Path(lpath).write_bytes(self.cat_file(rpath))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """A whole object."""
        self.ask("PUT", self._strip_protocol(path), value)

    def rm_file(self, path: str) -> None:
        """Removes one."""
        self.ask("DELETE", self._strip_protocol(path))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """There are no folders, but the bucket must be there."""
        self.ask("GET", self._strip_protocol(path).partition("/")[0], below="")


fsspec.register_implementation("objects", ObjectFileSystem, clobber=True)
