"""Messages over a socket, each as JSON with its length before it. Workers load it too: standard library
only.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LARGEST = 1 << 26  # bytes of a message


def _from_bytes(cell: bytes) -> dict[str, str]:
    return {"hex": cell.hex()}


def _to_bytes(changes: dict[str, str]) -> bytes:
    return bytes.fromhex(changes["hex"])


_ENCODER = json.JSONEncoder(default=_from_bytes, check_circular=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_hook=_to_bytes)


def encode(message: Any) -> bytes:
    """A message of lists, texts, numbers, None and bytes, as it is sent.

    Raises:
        ValueError: a number has too many digits.

    >>> encode(["a", b"b"])
    b'\\x00\\x00\\x00\\x12["a",{"hex":"62"}]'
    """
    body = _ENCODER.encode(message).encode()
    return len(body).to_bytes(4, "big") + body


class Channel:
    """One end of a socket.

    >>> near, far = map(Channel, socket.socketpair())
    >>> near.send(encode(["a", 1.5, b"b"]))
    >>> far.receive()
    ['a', 1.5, b'b']
    >>> near.close(), far.close()
    (None, None)
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)  # whatever Python's default for sockets was set to
        self._end = end
        self._unread = bytearray()
        self.send = end.sendall
        self.close = end.close

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of waiting for the other end. The kernel measures it, because Python would need
        two more system calls for each message.
        """
        time = struct.pack("@ll", int(seconds), 0)
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time)
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time)

    def receive(self) -> Any:
        """The next message.

        Raises:
            OSError: it did not come in time, or the other end was closed.
            ValueError: it is not as `encode` writes one.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > _LARGEST:
            raise ValueError(f"a message of {length} bytes")
        return _DECODER.decode(self._read(length).decode())

    def _read(self, count: int) -> bytes:
        while len(self._unread) < count:
            chunk = self._end.recv(1 << 16)
            if not chunk:
                raise ConnectionResetError("the other end was closed")
            self._unread += chunk
        found = bytes(self._unread[:count])
        del self._unread[:count]
        return found
