"""Run by benches in a process of its own: a web server of a file or folder behind a link of so many bytes a second.

    remote_link.py FILE|FOLDER BYTES_PER_SECOND LATENCY_SECONDS

Prints its port. All connections share the rate; each request waits for the latency first. `/stats` answers with the
requests and bytes so far and starts counting again. A folder is what S3 clients take for a store to read from, its
folders the buckets; keys are not looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.parse

SLICE = 64 * 1024


class Link:
    def __init__(self, path: str, rate: float, latency: float) -> None:
        self.path = path
        self.opened: dict[str, int] = {}
        self.rate, self.latency = rate, latency
        self.free = 0.0
        self.requests = self.sent = 0

    def find(self, name: str) -> tuple[int | None, int]:
        """Return the file that a request is about, and its size."""
        path = self.path
        if os.path.isdir(path):
            path = os.path.join(path, urllib.parse.unquote(name.partition("?")[0]).lstrip("/"))
        if path not in self.opened:
            if not os.path.isfile(path):
                return None, 0
            self.opened[path] = os.open(path, os.O_RDONLY)
        return self.opened[path], os.fstat(self.opened[path]).st_size

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self.answer(head.decode("latin-1"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET /stats"):
            body = json.dumps({"requests": self.requests, "sent": self.sent}).encode()
            self.requests = self.sent = 0
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            return
        self.requests += 1
        await asyncio.sleep(self.latency)
        file, size = self.find(head.split(" ", 2)[1])
        if file is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        found = re.search(r"(?im)^range: bytes=(\d+)-(\d*)", head)
        first = int(found[1]) if found else 0
        last = min(int(found[2]) if found and found[2] else size - 1, size - 1)
        status = "206 Partial Content" if found else "200 OK"
        more = f"Content-Range: bytes {first}-{last}/{size}\r\n" if found else ""
        writer.write(
            f'HTTP/1.1 {status}\r\nContent-Length: {last + 1 - first}\r\nAccept-Ranges: bytes\r\nETag: "one"\r\n'
            "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
            f"{more}\r\n".encode()
        )
        if head.startswith("HEAD"):
            await writer.drain()
            return
        for at in range(first, last + 1, SLICE):
            data = os.pread(file, min(SLICE, last + 1 - at), at)
            now = time.monotonic()
            self.free = max(self.free, now) + len(data) / self.rate
            self.sent += len(data)
            writer.write(data)
            await writer.drain()
            if self.free - now > 0.002:
                await asyncio.sleep(self.free - now)


async def main(path: str, rate: str, latency: str) -> None:
    link = Link(path, float(rate), float(latency))
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0, limit=1 << 16)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
