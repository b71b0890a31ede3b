"""Hostile servers: memory stays bounded, waiting ends, and secrets stay with the named server."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError

GIB = 2**30
READ = """
import sys
from kerasmem.errors import DataError
from kerasmem.hdf5.io import objects
from kerasmem.streaming.data_source import read_windows
objects._SILENCE = objects._CONNECT = 0.3
objects._LEAST_RATE = 2**30
objects._FIRST_WAIT = objects._LONGEST_WAIT = 0.01
try:
    list(read_windows([sys.argv[1]], ["x"]))
except DataError as error:
    sys.exit(f"Error: {error}")
"""


@pytest.fixture
def serve():
    """Start servers on loopback that answer with a function of the request. Returns their address."""
    servers = []

    def start(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                with contextlib.suppress(OSError):
                    answer(self)

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_longer_answer_than_requested_is_refused(attack, serve):
    size = 3 * GIB

    def answer(request):
        request.send_response(206)
        request.send_header("Content-Range", f"bytes 0-{size - 1}/{size}")
        request.send_header("Content-Length", str(size))
        request.end_headers()
        for _ in range(size // 2**20):
            request.wfile.write(bytes(2**20))

    found = attack(f"{serve(answer)}/x.h5", script=READ, memory=1 * GIB)
    assert found.code == 1 and "were requested, but the server sends" in found.err


HEAD = (
    b'HTTP/1.1 206 OK\r\nETag: "1"\r\nContent-Range: bytes 0-999/1000\r\n'
    b"Transfer-Encoding: chunked\r\n\r\n"
)  # fmt: skip


@pytest.mark.parametrize(
    "said", [(HEAD, b"3e0\r\n" + bytes(0x3E0) + b"\r\nzz\r\n"), (b"HTTP/1.1 100 Continue\r\n\r\n",)],
    ids=["breaks off its chunked encoding", "announces an answer and sends none"],
)  # fmt: skip
def test_silent_server_is_given_up(attack, serve, said):
    """aiohttp reports no error for broken chunked encoding, and no timeout after it or after "100 Continue"."""
    pytest.importorskip("aiohttp")

    def answer(request):
        for part in said:
            request.wfile.write(part)
            time.sleep(0.1)

    found = attack(f"{serve(answer)}/x.h5", script=READ, seconds=40)
    assert found.code == 1 and "failed 7 times in a row" in found.err, found.text


def ranges(data, headers, before=b"", after=b""):
    """Answer requests for ranges of some bytes, and record their headers."""

    def answer(request):
        headers.append(dict(request.headers))
        first, last = (int(byte) for byte in request.headers["Range"].removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        request.send_response(206)
        request.send_header("ETag", '"1"')
        request.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(data)}")
        body = before + body + after
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def test_a_multipart_answer_is_refused(serve, data, monkeypatch):
    monkeypatch.setattr("kerasmem.hdf5.io.objects._FIRST_WAIT", 0.01)
    address = serve(ranges(data, [], b"--x\r\nContent-Type: text/html\r\n\r\n", b"\r\n--x--"))
    with pytest.raises(DataError, match=r"failed 7 times in a row.*more than [0-9,]+ bytes came"):
        H5ChunkSequence(f"{address}/x.h5")


def moved_to(address):
    def answer(request):
        request.send_response(302)
        request.send_header("Location", address + request.path)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


@pytest.fixture
def data(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(64, dtype="f4").reshape(16, 4)
    return (tmp_path / "x.h5").read_bytes()


SECRETS = {"X-Api-Key": "SECRET", "Private-Token": "SECRET", "Authorization": "Bearer SECRET", "Cookie": "id=SECRET"}


def test_redirects_hide_secrets_from_other_servers(serve, data):
    direct, redirected = [], []
    moved, options = moved_to(serve(ranges(data, redirected))), {"storage_options": {"headers": SECRETS}}
    for answer in (moved, ranges(data, direct)):
        with H5ChunkSequence(f"{serve(answer)}/x.h5", y=None, shuffle=False, remote=options) as sequence:
            assert len(list(sequence)) == 1
    assert redirected and not any("SECRET" in str(headers) for headers in redirected)
    assert direct and all(headers.items() >= SECRETS.items() for headers in direct)
