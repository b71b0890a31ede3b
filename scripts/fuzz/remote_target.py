"""HTTP servers that answer with wrong ranges, lengths and versions, or redirect."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from cases import HEAP, SECRET, Case, Report, Target, Verdict, fill_heap, place_of
from hdf5_targets import same, warm_data_commands

BEHAVIOURS = (
    "short", "shorter than said", "long", "longer than said", "other range", "range without a total", "no range",
    "other total", "whole", "whole, no length", "nothing", "other version", "other version, same tag length", "no tag",
    "weak tag", "gzip said", "gzip", "chunked", "chunked, broken", "304", "404", "403", "412", "416", "429", "500",
    "503",
    "redirect to itself", "redirect to a file", "redirect elsewhere", "redirect to nowhere", "redirect without a place",
    "garbage", "many headers", "long header", "multipart", "drops", "slow", "endless", "negative length",
    "twice the length",
    "100", "204", "206 without body", "http 1.0", "huge total", "text total",
)  # fmt: skip
"""Misbehaviours of the server."""

_PLACES = {"redirect to itself": "{path}", "redirect to a file": "file://{secret}", "redirect elsewhere": "ftp://127.0.0.1/x",
           "redirect to nowhere": "http://127.0.0.1:1/x", "redirect without a place": ""}  # fmt: skip


class RemoteTarget(Target):
    """A local web server with two versions of a file."""

    name = "remote"
    seconds, waiting, batch = 8.0, 40.0, 15

    def prepare(self, folder: Path) -> None:
        """Import the remote readers, and make two versions of a file."""
        import aiohttp  # noqa: F401
        import fsspec.implementations.http  # noqa: F401

        import kerasmem.hdf5.io.access
        import kerasmem.hdf5.io.objects as objects
        import kerasmem.streaming.data_source  # noqa: F401

        warm_data_commands()
        objects._FIRST_WAIT = objects._LONGEST_WAIT = 0.002
        objects._CONNECT = objects._SILENCE = 0.7  # seconds, so that a silent server is given up within a case's time
        objects._LEAST_RATE = 1 << 20  # the same for one that never ends its headers
        self.versions = [_file(number) for number in range(2)]
        self.values = []
        for data in self.versions:
            with h5py.File(io.BytesIO(data)) as file:
                self.values.append({name: file[name][()] for name in ("x", "y")})

    def make(self, draw: random.Random) -> Case:
        """Return the server's behaviour at each request."""
        count = draw.choice((1, 1, 2, 3, 6))
        script = [draw.choice(BEHAVIOURS) if draw.random() < 0.6 else "well" for _ in range(count)]
        after = draw.choice(("well", "well", "well", draw.choice(BEHAVIOURS)))
        options: dict[str, object] = {
            "script": script,
            "after": after,
            "cache": draw.random() < 0.3,
            "seed": draw.random(),
        }
        return Case({}, (), {}, "", options)

    def attempt(self, case: Case, report: Report) -> Verdict:
        """Read the file, twice if there is a cache, and compare with the versions of the server."""
        server = _Server(self.versions, case.options)
        try:
            report("reading")
            return self._read(server, case, report)
        finally:
            server.close()

    def _read(self, server: _Server, case: Case, report: Report) -> Verdict:
        from kerasmem.errors import KerasmemError
        from kerasmem.hdf5.io.access import RemoteAccess
        from kerasmem.hdf5.rows.paths import Access
        from kerasmem.streaming.data_source import read_windows

        access = Access(remote=RemoteAccess(cache=str(Path("cache").absolute()) if case.options["cache"] else None))
        refused = ""
        for number in range(2 if case.options["cache"] else 1):
            fill_heap(number)
            try:
                windows = [{name: window[name].copy() for name in ("x", "y")}
                           for _, window in read_windows([server.url], ["x", "y"], access=access,
                           threads=2)]  # fmt: skip
            except KerasmemError as error:
                if SECRET.decode() in str(error):
                    return Verdict("outside", "another file's text in a message")
                refused = str(error)
                continue
            except MemoryError as error:
                return Verdict("memory", str(error))
            except Exception as error:
                return Verdict("defect", place_of(error))
            report("comparing")
            arrays = {name: np.concatenate([window[name] for window in windows]) for name in ("x", "y")}
            if HEAP in arrays["x"].tobytes():
                return Verdict("leak", "memory in the data")
            if not any(all(same(arrays[name], version[name]) for name in arrays) for version in self.values):
                return Verdict("wrong", "the data of no version")
        return Verdict("refused", refused) if refused else Verdict("ok and right")


def _file(version: int) -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        values = (np.arange(4000, dtype="f4") + 10_000 * version).reshape(400, 10)
        file.create_dataset("x", data=values, chunks=(25, 10), compression="gzip" if version else None)
        file["y"] = np.arange(400) % 4 + version
    return memory.getvalue().ljust(80_000, b"\0")


class _Server:
    """A local server for one case."""

    def __init__(self, versions: Sequence[bytes], options: dict[str, Any]) -> None:
        self.versions = versions
        self.script, self.after = list(options["script"]), str(options["after"])
        self.now = 0
        self.draw = random.Random(options["seed"])
        lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                with lock:
                    behaviour = outer.script.pop(0) if outer.script else outer.after
                with contextlib.suppress(OSError, ValueError):
                    _Answer(self, outer, behaviour).send()

            do_HEAD = do_GET

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *request: None  # type: ignore[method-assign]  (of a client that has gone)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/x.h5"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Answer:
    """One answer to one request."""

    def __init__(self, request: http.server.BaseHTTPRequestHandler, server: _Server, behaviour: str) -> None:
        self.request, self.server, self.behaviour = request, server, behaviour
        if behaviour.startswith("other version"):
            server.now = 1 - server.now
        self.data = server.versions[server.now]
        self.tag = f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'
        requested = request.headers.get("Range", "")
        first, _, last = requested.removeprefix("bytes=").partition("-")
        self.ranged = bool(requested)
        self.first = int(first or 0)
        self.last = min(int(last) if last else len(self.data) - 1, len(self.data) - 1)

    def send(self) -> None:
        """Answer according to the behaviour."""
        match = self.request.headers.get("If-Match")
        if self.behaviour == "well" and match and match != self.tag:
            self._send(412, b"")
        elif self.behaviour.isdigit():
            code = int(self.behaviour)
            self._send(code, b"" if code in (100, 204, 304) else SECRET[:4], {"Retry-After": "99999999"})
        elif self.behaviour in _PLACES:
            location = _PLACES[self.behaviour].format(
                path=self.request.path, secret=Path("../private/secret.h5").absolute()
            )
            self._send(
                self.server.draw.choice((301, 302, 303, 307, 308)), b"", {"Location": location} if location else {}
            )
        elif self.behaviour in ("garbage", "drops", "slow", "endless", "many headers", "long header", "100"):
            self._raw()
        else:
            self._changed()

    def _changed(self) -> None:
        body = self.data[self.first : self.last + 1] if self.ranged else self.data
        first, last, total = self.first, self.last, str(len(self.data))
        length: int | str | None = len(body)
        headers, kind = {"ETag": self.tag}, self.behaviour
        if kind.startswith("short"):
            cut = len(body) // 2
            length = cut if kind == "short" else length
            body = body[:cut]
        elif kind.startswith("long"):
            body += HEAP * 50
            length = len(body) if kind == "long" else length
        elif kind == "other range":
            first, last = first + 8, last + 8
            body = self.data[first : last + 1]
        elif kind in ("other total", "huge total", "text total", "range without a total"):
            total = {"other total": str(len(self.data) // 2), "huge total": str(1 << 60), "text total": "many"}.get(
                kind, "*"
            )
        elif kind == "negative length":
            length = -5
        elif kind == "twice the length":
            length = len(body) * 2
        elif kind in ("no tag", "weak tag"):
            headers = {} if kind == "no tag" else {"ETag": "W/" + self.tag}
        elif kind == "gzip said":
            headers["Content-Encoding"] = "gzip"
        elif kind == "gzip":
            import gzip

            body = gzip.compress(body)
            length, headers["Content-Encoding"] = len(body), "gzip"
        elif kind.startswith("chunked"):
            body = b"%x\r\n" % len(body) + body + (b"\r\nzz\r\n" if "broken" in kind else b"\r\n0\r\n\r\n")
            length, headers["Transfer-Encoding"] = None, "chunked"
        elif kind == "multipart":
            headers["Content-Type"] = "multipart/byteranges; boundary=x"
            body = b"--x\r\nContent-Range: bytes 0-3/9\r\n\r\n" + body + b"\r\n--x--"
            length = len(body)
        elif kind in ("nothing", "206 without body"):
            body, length = b"", 0
        whole = kind in ("whole", "whole, no length") or not self.ranged
        if whole:
            body, length = self.data, None if kind == "whole, no length" else len(self.data)
        elif kind != "no range":
            headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        if length is not None:
            headers["Content-Length"] = str(length)
        if kind == "http 1.0":
            self.request.protocol_version = "HTTP/1.0"
        self._send(200 if whole else 206, body, headers)

    def _raw(self) -> None:
        """Send invalid or endless HTTP."""
        to = self.request.wfile
        self.request.close_connection = True
        if self.behaviour == "garbage":
            to.write(self.server.draw.randbytes(200))
        elif self.behaviour == "many headers":
            to.write(b"HTTP/1.1 206 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n")
        elif self.behaviour == "long header":
            to.write(b"HTTP/1.1 206 OK\r\nETag: " + b"x" * 10_000_000 + b"\r\n\r\n")
        elif self.behaviour == "endless":
            to.write(b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-99/80000\r\n\r\n")
            for _ in range(3000):
                to.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        elif self.behaviour == "slow":
            to.write(b"HTTP/1.1 206 OK\r\nContent-Length: 100\r\nContent-Range: bytes 0-99/80000\r\n\r\n" + bytes(10))
            threading.Event().wait(0.5)

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        headers = headers or {}
        self.request.send_response(code)
        for name, value in headers.items():
            self.request.send_header(name, value)
        if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
            if code in (200, 206):
                self.request.close_connection = True
            else:
                self.request.send_header("Content-Length", str(len(body)))
        self.request.end_headers()
        if self.request.command != "HEAD":
            self.request.wfile.write(body)
        if str(headers.get("Content-Length", len(body))) != str(len(body)):
            self.request.close_connection = True
