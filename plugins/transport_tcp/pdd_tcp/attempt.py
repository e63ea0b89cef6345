"""One session on the receiving side: from a subscription to the last block, or to the first trouble."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pdd_runtime.clock import now
from pdd_runtime.errors import LayoutError, PddError, TransferError
from pdd_runtime.plugins.transport import BlockSink, Subscription
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.sockets import Cut, receive_into, receive_message, set_up, shut

CONNECT_SECONDS = 5.0
BYTES_PER_STREAM = 1 << 20
"""A fetch opens another stream for each MiB: below that, connecting costs more than it brings."""


class Damaged(Cut):
    """A frame was not what its checksum says."""


class Attempt:
    """Runs in the thread that calls `run`, and one more for each further stream. `numbers` are the positions of the
    subscription's blocks in the fetch, by which the sink knows them."""

    def __init__(
        self,
        address: tuple[str, int],
        subscription: Subscription,
        numbers: list[int],
        sink: BlockSink,
        settled: Callable[[int, bool], None],
        config: TcpConfig,
        extra_streams: threading.Semaphore,
    ) -> None:
        self._address, self._subscription, self._numbers = address, subscription, numbers
        self._sink, self._settled, self._config = sink, settled, config
        self._extra_streams = extra_streams
        self._fetch = secrets.token_bytes(wire.NAME_BYTES)
        self._binding = wire.Binding(self._fetch, subscription.request_id)
        self._lock = threading.Lock()
        self._claimed = [False] * len(numbers)
        self._missing = len(numbers)
        self._sockets: set[socket.socket] = set()
        self._over = False
        self._trouble: BaseException | None = None
        self.accepted = False

    def run(self) -> None:
        """Returns when every block has come or is gone. Raises `Cut` when what is missing may be asked for again,
        and `PddError` when there is no use."""
        threads: list[threading.Thread] = []
        try:
            hello = wire.Subscribe.of(self._subscription, self._fetch, beat=self._config.io_timeout / 3)
            with self._connection(hello) as (sock, accept):
                self.accepted = True
                threads = self._attach(min(accept.streams, self._config.streams))
                self._receive(sock)
        except BaseException as trouble:
            self.end(trouble)
        finally:
            for thread in threads:
                thread.join()
        if self._trouble is not None:
            raise self._trouble

    def end(self, trouble: BaseException | None = None) -> None:
        """Any thread: close all connections; `run` raises the first trouble, if there is any before the end."""
        with self._lock:
            if self._over:
                return
            self._over, self._trouble = True, trouble
            for sock in self._sockets:
                shut(sock)

    @contextlib.contextmanager
    def _connection(self, hello: wire.Hello) -> Iterator[tuple[socket.socket, wire.Accept]]:
        """A connection that the sender has accepted. Raises `Cut`, or the `PddError` with which it refused."""
        family, _, _, _, address = self._resolve()
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            with self._lock:
                self._sockets.add(sock)
            try:
                self._connect(sock, address)
                yield sock, self._greet(sock, hello)
            finally:
                with self._lock:
                    self._sockets.discard(sock)

    def _resolve(self) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]:
        try:
            return socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise Cut(f"cannot resolve {self._address[0]}: {error.strerror}") from error

    def _connect(self, sock: socket.socket, address: Any) -> None:
        try:
            sock.settimeout(min(CONNECT_SECONDS, self._config.io_timeout))
            sock.connect(address)
        except OSError as error:
            raise Cut(f"cannot connect: {error.strerror or error}") from error
        with self._lock:
            if self._over:  # `end` may have come before there was a connection to close.
                raise Cut("the fetch is over")

    def _greet(self, sock: socket.socket, hello: wire.Hello) -> wire.Accept:
        timeout = self._config.io_timeout
        try:
            sock.settimeout(timeout)
            sock.sendall(wire.pack(hello))
        except OSError as error:
            raise Cut(f"the connection broke: {error.strerror or error}") from error
        answer = wire.unpack_answer(receive_message(sock, wire.ANSWER_LIMIT, now() + timeout))
        if isinstance(answer, wire.Refuse):
            raise PddError.from_wire(answer.error)
        set_up(sock, timeout)
        return answer

    def _attach(self, streams: int) -> list[threading.Thread]:
        blocks = len(self._numbers)
        useful = min(streams - 1, blocks - 1, blocks * self._subscription.layout.block_bytes // BYTES_PER_STREAM)
        threads: list[threading.Thread] = []
        while len(threads) < useful and self._extra_streams.acquire(blocking=False):
            name = f"{threading.current_thread().name}-{len(threads) + 1}"
            threads.append(threading.Thread(target=self._extra_stream, name=name, daemon=True))
            threads[-1].start()
        return threads

    def _extra_stream(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                try:
                    sock, _ = stack.enter_context(self._connection(wire.Attach(self._fetch)))
                except (Cut, PddError):
                    return  # The other streams bring the blocks.
                self._receive(sock)
        except BaseException as trouble:
            self.end(trouble)
        finally:
            self._extra_streams.release()

    def _receive(self, sock: socket.socket) -> None:
        """Take frames until nothing is missing."""
        header = bytearray(wire.FRAME_BYTES)
        while True:
            receive_into(sock, memoryview(header))
            frame = wire.unpack_frame(header)
            if frame.kind == wire.DATA:
                self._block(sock, header, frame)
            elif frame.kind == wire.GONE:
                self._gone(header, frame)
            else:
                self._notice(sock, header, frame)
            if not self._missing:
                self.end()
                return

    def _block(self, sock: socket.socket, header: bytearray, frame: wire.Frame) -> None:
        size = self._subscription.layout.block_bytes
        if frame.length != size:
            raise Damaged(f"a block of {frame.length} bytes, where the layout has {size}")
        number = self._claim(frame)
        memory = self._sink.memory(number).cast("B")
        if len(memory) != size:
            raise ValueError(f"the sink has {len(memory)} bytes for block {number}, and the layout {size}")
        receive_into(sock, memory)
        if not wire.intact(header, memory):
            raise Damaged("the bytes of a block are not what its checksum says")
        self._settle(number, True)

    def _gone(self, header: bytearray, frame: wire.Frame) -> None:
        if frame.length or not wire.intact(header):
            raise Damaged("a frame is not what its checksum says")
        self._settle(self._claim(frame), False)

    def _notice(self, sock: socket.socket, header: bytearray, frame: wire.Frame) -> None:
        if frame.kind not in (wire.BEAT, wire.ERROR) or frame.length > wire.ANSWER_LIMIT:
            raise Damaged(f"a frame of kind {frame.kind} with {frame.length} bytes")
        body = bytearray(frame.length)
        receive_into(sock, memoryview(body))
        if frame.bind != self._binding.session or not wire.intact(header, body):
            raise Damaged("a frame is not what its checksum says, or another request's")
        if frame.kind == wire.ERROR:
            error = wire.unpack_error(body)
            if isinstance(error, LayoutError | TransferError):
                raise error
            raise TransferError("the sender gave the transfer up", where=error.where, why=error.what, fix=error.fix)

    def _claim(self, frame: wire.Frame) -> int:
        """The number of a frame's block, which is this frame's from now on: no byte is written before."""
        if frame.block >= len(self._numbers):
            raise Damaged(f"a frame for block {frame.block} of {len(self._numbers)}")
        if frame.bind != self._binding.block(self._subscription.blocks[frame.block].name):
            raise Damaged("a frame of another request, or of another block than it says")
        with self._lock:
            if self._claimed[frame.block]:
                raise Damaged(f"block {frame.block} came twice")
            self._claimed[frame.block] = True
        return self._numbers[frame.block]

    def _settle(self, number: int, there: bool) -> None:
        self._settled(number, there)
        with self._lock:
            self._missing -= 1
