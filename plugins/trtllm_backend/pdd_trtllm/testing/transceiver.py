"""Moves KV from one stand-in to another: what a context keeps is for one reader, and for some time."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from pdd_runtime.clock import now
from pdd_trtllm.testing.disaggregation import Generation
from pdd_trtllm.testing.model import PagedModel

log = logging.getLogger(__name__)

LINE = "PDD_STANDIN_LINE"
"""An environment variable: seconds that a transfer takes at least."""
TIMEOUT = 60.0
"""Seconds that a context waits for its reader, and a reader for its context, where the configuration does not say."""
_LENGTH = struct.Struct("<I")
_MOST = 1 << 16
"""Bytes of a message that is no KV."""
_DONE = b"\1"
_NEVER = float("inf")


class Outcome(NamedTuple):
    """A transfer is over, at this end."""

    request: int
    kind: Literal["sent", "received", "lost"]
    why: str = ""


class _Wanted(msgspec.Struct):
    """What a reader says first."""

    request: int
    have: int
    """Leading tokens whose KV it has."""


@dataclass
class _Kept:
    """A context's KV, in pages that stay."""

    pages: tuple[int, ...]
    tokens: int
    until: float
    reading: bool = False


@dataclass
class _Pull:
    until: float
    why: str = "Error in kv cache transfer for generation requests"
    socket: socket.socket | None = None


class Transceiver:
    """Called in the executor's thread, which hears how transfers end by `post`. Each transfer has a thread at either
    end: it reads from pages that are kept, or writes to pages that are its request's own."""

    def __init__(self, model: PagedModel, timeout: float, post: Callable[[Outcome], None]) -> None:
        self._model, self._timeout, self._post = model, timeout, post
        layout = model.layout
        self.geometry = (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_size)
        """Two servers that exchange KV must have the same; they may differ in ranks."""
        self._line = float(os.environ.get(LINE, 0))
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}
        self._late: set[int] = set()
        """Contexts whose time was over before their reader came."""
        self._pulls: dict[int, _Pull] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="transceiver", daemon=True).start()

    @property
    def patience(self) -> float | None:
        """Seconds until some transfer's time is over; None: none is under way."""
        with self._lock:
            ends = [kept.until for kept in self._kept.values() if not kept.reading]
            ends += [pull.until for pull in self._pulls.values() if pull.until < _NEVER]
        return max(0.0, min(ends) - now()) if ends else None

    def keep(self, request: int, pages: Sequence[int], tokens: int) -> None:
        """Until `Outcome("sent")`, or until `expire` names it."""
        with self._lock:
            self._kept[request] = _Kept(tuple(pages), tokens, now() + self._timeout)

    def pull(self, request: int, asked: Generation, pages: Sequence[int], have: int, tokens: int) -> None:
        """Write the KV of the tokens from `have` on to `pages`, until `Outcome` says "received" or "lost"."""
        with self._lock:
            pull = self._pulls[request] = _Pull(now() + self._timeout)
        work = (request, pull, asked, tuple(pages), have, tokens)
        threading.Thread(target=self._pull, args=work, name=f"receiving {request}", daemon=True).start()

    def abandon(self, request: int, why: str) -> None:
        """A reader that has not all yet is "lost" soon: it may still be writing."""
        with self._lock:
            pull = self._pulls.get(request)
            if pull is None:
                return
            pull.why, pull.until = why, _NEVER
            if pull.socket is not None:
                with suppress(OSError):
                    pull.socket.shutdown(socket.SHUT_RDWR)

    def expire(self) -> list[int]:
        """Contexts whose time is over, with no reader there: they are kept no longer. Readers are told so by the next
        `Outcome`."""
        with self._lock:
            over = [number for number, kept in self._kept.items() if kept.until <= now() and not kept.reading]
            for number in over:
                del self._kept[number]
            self._late.update(over)
            waited = [number for number, pull in self._pulls.items() if pull.until <= now()]
        for number in waited:
            self.abandon(number, f"Request {number} timed out")
        return over

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._send, args=(sock,), name="sending", daemon=True).start()

    def _send(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, EOFError, msgspec.MsgspecError):
            wanted = msgspec.json.decode(_message(sock), type=_Wanted)
            with self._lock:
                kept, late = self._kept.get(wanted.request), wanted.request in self._late
                if kept is not None and kept.reading:
                    kept = None
                if kept is not None and kept.until <= now():
                    late = True
                if kept is not None and not late:
                    kept.reading = True
            if late:
                _tell(sock, False)
            elif kept is None:
                sock.recv(1)  # A context that may be to come: a second reader waits until it gives up.
            else:
                try:
                    self._send_kept(sock, kept, wanted.have)
                finally:
                    with self._lock:
                        del self._kept[wanted.request]
                    self._post(Outcome(wanted.request, "sent"))

    def _send_kept(self, sock: socket.socket, kept: _Kept, have: int) -> None:
        _tell(sock, True)
        threading.Event().wait(self._line)
        sock.sendall(self._model.rows(kept.pages, have, kept.tokens).tobytes())
        sock.recv(len(_DONE))

    def _pull(
        self, request: int, pull: _Pull, asked: Generation, pages: tuple[int, ...], have: int, tokens: int
    ) -> None:
        received = False
        try:
            if asked.state.geometry != self.geometry:
                raise ValueError(f"a KV cache of {asked.state.geometry} for one of {self.geometry}")
            with socket.create_connection((asked.state.host, asked.state.port)) as sock:
                with self._lock:
                    pull.socket = sock
                    if pull.until == _NEVER:
                        raise ConnectionAbortedError("given up")
                _tell(sock, _Wanted(asked.request, have))
                if _message(sock) == b"true":
                    self._take(sock, pages, have, tokens)
                    sock.sendall(_DONE)
                    received = True
        except (OSError, EOFError, ValueError) as error:
            log.error("receiving for request %d: %s", request, error)
        with self._lock:
            del self._pulls[request]
        self._post(Outcome(request, "received") if received else Outcome(request, "lost", pull.why))

    def _take(self, sock: socket.socket, pages: tuple[int, ...], have: int, tokens: int) -> None:
        rows = np.empty((tokens - have, *self._model.row), self._model.unsigned)
        view = rows.reshape(-1).view(np.uint8).data
        while view:
            count = sock.recv_into(view)
            if not count:
                raise EOFError("the context's server hung up")
            view = view[count:]
        self._model.put(pages, have, rows)


def _tell(sock: socket.socket, message: object) -> None:
    body = msgspec.json.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _message(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > _MOST:
        raise EOFError(f"a message of {length} bytes")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = sock.recv(n - len(data))
        if not piece:
            raise EOFError("hung up")
        data += piece
    return data
