"""Objects and large arrays between two processes of ours, by a socket; arrays go as they lie in memory."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEAD = struct.Struct("!QQ")
_LENGTH = struct.Struct("!Q")


class Channel:
    """One end.

    Args:
        end: of a `socketpair`; both ends are processes of ours, for what is read is unpickled.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any) -> None:
        """Send an object."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        lengths = b"".join(_LENGTH.pack(view.nbytes) for view in views)
        self._socket.sendall(_HEAD.pack(len(data), len(views)) + lengths + data)
        for view in views:
            self._socket.sendall(view)

    def receive(self) -> Any:
        """Wait for an object.

        Raises:
            EOFError: the other end is gone.
        """
        size, count = _HEAD.unpack(self._exactly(_HEAD.size))
        lengths = [_LENGTH.unpack(self._exactly(_LENGTH.size))[0] for _ in range(count)]
        data = self._exactly(size)
        return pickle.loads(data, buffers=[self._exactly(length) for length in lengths])

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            read = self._socket.recv_into(view)
            if read == 0:
                raise EOFError
            view = view[read:]
        return data
