"""Stores on loopback: a small web server with faults, and moto's S3 with a log of ranges.

A fault is a function of a request: it gets (method, name, first, last) and returns None, or ("status", 503),
("cut", bytes after which the body breaks off), ("wait", seconds) or ("whole",) to ignore the requested range.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import socket
import threading
import time
from email.utils import formatdate

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class FileServer:
    """A web server of files in memory: ranges, ETags, If-Match, redirects, listings, and faults."""

    def __init__(self, files):
        self.files = files
        self.etag = self.modified = True
        self.rate = None  # bytes per second
        self.fault = lambda method, name, first, last: None
        self.redirects = {}
        self.needs = None  # an Authorization header
        self.log = []  # (method, name, first, last, status)
        self.lock = threading.Lock()
        self._times, self._tags = {}, {}
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    server.answer(self)

            do_HEAD = do_GET

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.port = self.http.server_address[1]

    def url(self, name, scheme="http", user=""):
        return f"{scheme}://{user}127.0.0.1:{self.port}/{name}"

    def put(self, name, data, when=None):
        self.files[name] = data
        self._times[name] = when or time.time()

    def tag(self, name):
        data = self.files[name]
        if self._tags.get(name, (None,))[0] is not data:
            self._tags[name] = (data, '"' + hashlib.md5(data).hexdigest() + '"')
        return self._tags[name][1]

    @property
    def requests(self):
        return [each for each in self.log if each[0] == "GET"]

    @property
    def sent(self):
        return sum(each[3] - each[2] for each in self.requests if each[4] in (200, 206))

    def answer(self, request):
        name = request.path.split("?", 1)[0].lstrip("/")
        found = RANGE.fullmatch(request.headers.get("Range", ""))
        data = self.files.get(name)
        first, last = (int(found[1]), int(found[2]) + 1) if found else (0, len(data or b""))
        last = min(last, len(data or b""))
        with self.lock:
            fault = self.fault(request.command, name, first, last)
        status, headers, body = 206 if found else 200, {}, b""
        if self.needs and request.headers.get("Authorization") != self.needs:
            status = 401
        elif fault and fault[0] == "status":
            status = fault[1]
        elif name in self.redirects:
            status, headers["Location"] = 302, self.redirects[name]
        elif name.endswith("/") or not name:
            inside = [other for other in self.files if other.startswith(name) and "/" not in other[len(name) :]]
            body = "".join(f'<a href="/{other}">{other}</a>' for other in inside).encode()
            status, headers["Content-Type"] = 200, "text/html"
            first, last = 0, len(body)
            data = body
        elif data is None:
            status = 404
        elif self.etag and request.headers.get("If-Match") not in (None, self.tag(name)):
            status = 412
        else:
            if self.etag:
                headers["ETag"] = self.tag(name)
            if self.modified:
                headers["Last-Modified"] = formatdate(self._times.get(name, 1.7e9), usegmt=True)
            if fault and fault[0] == "whole":
                status, first, last = 200, 0, len(data)
            elif found and first >= len(data):
                status, headers["Content-Range"] = 416, f"bytes */{len(data)}"
            elif found:
                headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(data)}"
        if status in (200, 206):
            body = data[first:last]
        with self.lock:
            self.log.append((request.command, name, first, last, status))
        if fault and fault[0] == "wait":
            time.sleep(fault[1])
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if fault and fault[0] == "cut":
            request.wfile.write(body[: fault[1]])
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        for at in range(0, len(body), 1 << 16):
            request.wfile.write(body[at : at + (1 << 16)])
            if self.rate:
                time.sleep((1 << 16) / self.rate)

    def close(self):
        self.http.shutdown()
        self.http.server_close()


class S3Server:
    """moto's S3 in this process.

    Attributes:
        ranges: first byte and stop of each range that was requested.
        links: whether each of them was requested through a signed link.
        refuses_links: whether to refuse these.
    """

    OPTIONS = {"key": "testing", "secret": "secretkey-of-the-tests"}  # noqa: RUF012

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        self.ranges, self.links, self.refuses_links = [], [], False
        inner = DomainDispatcherApplication(create_backend_app)

        def logged(environ, start):
            match = RANGE.fullmatch(environ.get("HTTP_RANGE", ""))
            if match and environ["REQUEST_METHOD"] == "GET":
                self.ranges.append((int(match[1]), int(match[2]) + 1))
                self.links.append("X-Amz-Signature" in environ["QUERY_STRING"])
                if self.links[-1] and self.refuses_links:
                    start("403 Forbidden", [("Content-Length", "0")])
                    return []
            return inner(environ, start)

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_request(self, *arguments):
                pass

        self.http = make_server("127.0.0.1", 0, logged, threaded=True, request_handler=Quiet)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"
        self.options = {**self.OPTIONS, "endpoint_url": self.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def put(self, bucket, name, data):
        import boto3

        client = boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id=self.OPTIONS["key"],
            aws_secret_access_key=self.OPTIONS["secret"],
        )  # fmt: skip
        with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key=name, Body=data)

    def close(self):
        self.http.shutdown()
        self.http.server_close()
