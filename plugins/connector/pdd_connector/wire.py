"""Messages on the socket between connector and worker: JSON objects behind their length, little-endian, in 4 bytes.

The worker's side is `pdd_runtime.server.bridge`, and speaks the same `VERSION`.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

VERSION = 2
LIMIT = 64 << 20
"""Bytes of the largest message: the ids of a very long prompt."""
_LENGTH = struct.Struct("<I")


def encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end of the stream. Raises `ValueError` for what is none, `OSError`."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > LIMIT:
        raise ValueError(f"a message of {length} bytes, where {LIMIT} is the limit")
    body = _exactly(sock, length)
    if body is None:
        return None
    message = json.loads(body)
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ValueError("a message that is no object with a type")
    return message


def _exactly(sock: socket.socket, n: int) -> bytes | None:
    data = bytearray()
    while len(data) < n:
        piece = sock.recv(min(n - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
