"""The connector's side of the socket to its worker."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pdd_connector import wire
from pdd_connector.keys import page_key, page_keys

log = logging.getLogger(__name__)

_ELEMENT = {"float32": "<u4", "bfloat16": "<u2", "float16": "<u2"}
_REDIAL, _REDIAL_MOST = 0.02, 0.5
"""Seconds to the next attempt to reach the worker: at first, and at most; each wait is twice the one before."""
_DIALS = 60.0
"""Seconds that the first attempt may take in all: the engine is configured for KV, so it waits for its worker."""
_PATIENCE = 2
"""Seconds that a worker which reads nothing may hold up the engine, once; then it counts as gone."""


class Refused(Exception):
    """The worker will not share its blocks with this engine, and says why; or there is no worker."""


@dataclass(frozen=True)
class Geometry:
    """The KV that an engine holds."""

    layers: int
    kv_heads: int
    """Of all ranks together."""
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    block_size: int = 0
    """Tokens in a page, where a block must be a page; 0: blocks of any size will do."""
    capacity: int = 0
    """Tokens in the engine's own cache, all ranks alike."""


@dataclass(frozen=True)
class Transfer:
    """One request, as the worker has announced it: a snapshot, replaced by another when blocks are added."""

    id: str
    tokens: int
    """Tokens known when the request was sent: the prompt, or the prompt and what was made of it."""
    offered: int
    """The KV of so many leading tokens lies in `blocks`; the last of these blocks may be filled in part."""
    first: int
    """`blocks[first:]` are wanted: write the KV of their tokens, as it is computed."""
    blocks: tuple[int, ...]
    """Block numbers in order of position."""
    keys: tuple[bytes, ...] = ()
    """`page_keys` of the tokens known by now, where the connection asked for them."""
    key: bytes = b""
    """`page_key` over all of the `tokens`, where the connection asked for keys."""
    tail: int | None = None
    """No more than so many tokens are wanted, and these as soon as they are there, the last block in part."""


class _Entry:
    """A transfer, and who is copying for it."""

    def __init__(self, transfer: Transfer, ids: list[int], root: bytes) -> None:
        self.transfer, self.ids, self.root = transfer, ids, root
        self.users = 0
        self.forgotten = False


class AgentClient:
    """One process of the engine, connected to its worker.

    Every method may be called from any thread. None of them raises into the engine, and none waits for the worker:
    while there is no worker, nothing is offered or wanted. A thread of its own reads what the worker says, and dials
    again when the worker was replaced by another.
    """

    def __init__(
        self,
        path: str,
        *,
        engine: str,
        role: Literal["scheduler", "worker"],
        rank: int = 0,
        ranks: int = 1,
        geometry: Geometry | None = None,
        page: int | None = None,
        seed: Callable[[str], bytes] = lambda salt: b"",
        on_change: Callable[[Transfer], None] | None = None,
    ) -> None:
        """`engine`: its name and version, for people. `page`: send the tokens of each transfer, and give its `keys` for
        pages of so many, behind the `seed` of its tenant's salt. `on_change` is called in the reading thread with every
        new snapshot. Role `worker` must give its geometry. Raises `Refused`."""
        if role == "worker" and geometry is None:
            raise ValueError("a worker connection needs a geometry")
        self._path, self._page, self._seed, self._on_change = path, page, seed, on_change
        self._rank, self._ranks, self._geometry = rank, ranks, geometry
        self._hello: dict[str, Any] = {
            "t": "hello",
            "version": wire.VERSION,
            "engine": engine,
            "role": role,
            "rank": rank,
            "ranks": ranks,
            "pid": os.getpid(),
            "tokens": page is not None,
            "geometry": None if geometry is None else vars(geometry),
        }
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[bytes, str] = {}
        self._users = 0
        """Threads that copy now, for whatever transfer."""
        self._socket: socket.socket | None = None
        self._over = threading.Event()
        self.block_size = 0
        """Tokens in a block of the worker."""
        self.blocks: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        """This rank's part of all blocks, `[blocks, shard bytes]`, writable and shared; empty for a scheduler. Another
        array after another worker has come: take it anew inside each `using`."""
        self._dial_first()
        self._reader = threading.Thread(target=self._read, name="pdd-connector", daemon=True)
        self._reader.start()

    @property
    def closed(self) -> bool:
        """There is no worker now."""
        return self._socket is None

    def request(self, id: str) -> Transfer | None:
        """What is announced for a request; None: nothing."""
        with self._lock:
            entry = self._entries.get(id)
            return None if entry is None or entry.forgotten else entry.transfer

    def by_key(self, key: bytes) -> Transfer | None:
        """The same by `page_key` over all tokens of the request: for engines that do not show the request's id."""
        with self._lock:
            entry = self._entries.get(self._by_key.get(key, ""))
            return None if entry is None or entry.forgotten else entry.transfer

    def transfers(self) -> tuple[Transfer, ...]:
        """All that is announced now."""
        with self._lock:
            return tuple(entry.transfer for entry in self._entries.values() if not entry.forgotten)

    @contextmanager
    def using(self, id: str) -> Iterator[Transfer | None]:
        """Inside, the blocks of the transfer are there to be read and written; None where it is over. Keep it short:
        the worker waits for its end before it gives the blocks to others."""
        with self._lock:
            entry = self._entries.get(id)
            if entry is not None and entry.forgotten:
                entry = None
            if entry is not None:
                entry.users += 1
                self._users += 1
        try:
            yield None if entry is None else entry.transfer
        finally:
            if entry is not None:
                with self._lock:
                    entry.users -= 1
                    self._users -= 1
                    gone = entry.forgotten and not entry.users and self._drop(entry)
                if gone:
                    self._send({"t": "forgot", "id": id})

    def shard(self, block: int) -> NDArray[Any]:
        """This rank's part of a block, `[layers, 2 (K, V), block_size, kv_heads / ranks, head_dim]`, as unsigned
        integers of the element's size; a view. Inside `using` only."""
        geometry = self._geometry
        assert geometry is not None
        shape = (geometry.layers, 2, self.block_size, geometry.kv_heads // self._ranks, geometry.head_dim)
        elements: NDArray[Any] = self.blocks[block].view(_ELEMENT[geometry.dtype])
        return elements.reshape(shape)

    def planned(self, id: str, local: int, offered: int) -> None:
        """The scheduler's plan: `local` tokens are in the engine's own cache, `offered` more will be loaded."""
        self._send({"t": "planned", "id": id, "local": local, "offered": offered})

    def loaded(self, id: str, tokens: int) -> None:
        """So many of the planned tokens were copied into the engine. Fewer than planned: the rest is recomputed."""
        self._send({"t": "loaded", "id": id, "tokens": tokens})

    def written(self, id: str, tokens: int) -> None:
        """The KV of the first `tokens` tokens lies in the blocks, as far as this rank makes it."""
        self._send({"t": "written", "id": id, "tokens": tokens})

    def finished(self, id: str, tokens: int) -> None:
        """The request is over in the engine: this rank writes and reads no more for it. The KV of `tokens` tokens lies
        in the blocks, the partial tail included."""
        self._send({"t": "finished", "id": id, "tokens": tokens})

    def close(self) -> None:
        """Hang up for good."""
        self._over.set()
        sock = self._socket
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _dial_first(self) -> None:
        until, wait = time.monotonic() + _DIALS, _REDIAL
        while True:
            try:
                self._dial()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise Refused(f"no worker listens at {self._path}: {error}") from error
            self._over.wait(wait)
            wait = min(2 * wait, _REDIAL_MOST)

    def _dial(self) -> None:
        """Connect and greet. Raises `OSError`, and `Refused` with the worker's own words."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _PATIENCE, 0))
        try:
            sock.connect(self._path)
            sock.sendall(wire.encode(self._hello))
            # The descriptor of the memory comes with a byte of its own before the answer.
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            try:
                answer = wire.receive(sock)
                if answer is None:
                    raise ConnectionError("the worker hung up")
                if answer["t"] != "welcome":
                    raise Refused(str(answer.get("why", "no reason given")))
                self._map(answer, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        except BaseException:
            sock.close()
            raise
        self._socket = sock

    def _map(self, welcome: dict[str, Any], fds: list[int]) -> None:
        self.block_size = int(welcome["block_size"])
        if self._geometry is None:
            return
        blocks, size = int(welcome["blocks"]), int(welcome["block_bytes"])
        memory = np.frombuffer(mmap.mmap(fds[0], blocks * size), np.uint8).reshape(blocks, size)
        shard = size // self._ranks
        self.blocks = memory[:, self._rank * shard : (self._rank + 1) * shard]

    def _read(self) -> None:
        """The thread: everything the worker says, from every worker that comes."""
        wait = _REDIAL
        while not self._over.is_set():
            sock = self._socket
            if sock is None:
                # Who still copies has the memory of the worker that is gone.
                if self._over.wait(wait) or self._users:
                    continue
                wait = min(2 * wait, _REDIAL_MOST)
                try:
                    self._dial()
                except (OSError, ValueError):
                    pass
                except Refused as refusal:
                    log.error("the worker refuses this engine: %s", refusal)
                continue
            try:
                while (message := wire.receive(sock)) is not None:
                    self._take(message)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if not self._over.is_set():
                    log.warning("the connection to the worker broke: %s", error)
            self._hang_up(sock)
            wait = _REDIAL

    def _hang_up(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = None
            for entry in self._entries.values():
                entry.forgotten = True
            self._entries.clear()
            self._by_key.clear()
        sock.close()

    def _take(self, message: dict[str, Any]) -> None:
        match message["t"]:
            case "transfer":
                self._announce(message)
            case "more":
                self._extend(message)
            case "tail":
                self._cut(message["id"], int(message["tokens"]))
            case "forget":
                self._forget(message["id"])
            case other:
                raise ValueError(f"a message of an unknown type: {other}")

    def _announce(self, message: dict[str, Any]) -> None:
        ids = message.get("ids") or []
        root = self._seed(message.get("salt", ""))
        keys, key = (page_keys(ids, self._page, root), page_key(root, ids)) if self._page else ((), b"")
        transfer = Transfer(
            id=message["id"],
            tokens=message["tokens"],
            offered=message["offered"],
            first=message["first"],
            blocks=tuple(message["blocks"]),
            keys=keys,
            key=key,
        )
        with self._lock:
            self._entries[transfer.id] = _Entry(transfer, ids, root)
            if key:
                self._by_key[key] = transfer.id
        self._changed(transfer)
        self._send({"t": "ack", "id": transfer.id})

    def _extend(self, message: dict[str, Any]) -> None:
        with self._lock:
            entry = self._entries.get(message["id"])
            if entry is None or entry.forgotten:
                return
            transfer = replace(entry.transfer, blocks=(*entry.transfer.blocks, *message["blocks"]))
            if self._page:
                entry.ids.extend(message.get("ids") or [])
                done = len(transfer.keys)
                previous = transfer.keys[-1] if transfer.keys else entry.root
                more = page_keys(entry.ids[done * self._page :], self._page, previous)
                transfer = replace(transfer, keys=(*transfer.keys, *more))
            entry.transfer = transfer
        self._changed(transfer)

    def _cut(self, id: str, tokens: int) -> None:
        with self._lock:
            entry = self._entries.get(id)
            if entry is None or entry.forgotten:
                return
            transfer = entry.transfer = replace(entry.transfer, tail=tokens)
        self._changed(transfer)

    def _forget(self, id: str) -> None:
        with self._lock:
            entry = self._entries.get(id)
            if entry is not None:
                entry.forgotten = True
                if entry.users:
                    return  # the last user says so
                self._drop(entry)
        self._send({"t": "forgot", "id": id})

    def _drop(self, entry: _Entry) -> bool:
        """Under the lock; False where it was dropped before, with its connection."""
        transfer = entry.transfer
        if self._entries.get(transfer.id) is not entry:
            return False
        del self._entries[transfer.id]
        if self._by_key.get(transfer.key) == transfer.id:
            del self._by_key[transfer.key]
        return True

    def _changed(self, transfer: Transfer) -> None:
        if self._on_change is not None:
            try:
                self._on_change(transfer)
            except Exception:
                log.exception("a change of a transfer could not be followed")

    def _send(self, message: dict[str, Any]) -> None:
        sock = self._socket
        if sock is None:
            return
        try:
            with self._sending:
                sock.sendall(wire.encode(message))
        except OSError:
            # The reader notices, too, and dials again.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
