"""One fetch on the receiving side: what of it is here."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, LayoutError, PddError, TransferError
from pdd_runtime.plugins.transport import BlockSink, Subscription, TransferReport, incomplete
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.encoding import AS_IT_LIES, BLOSC2, INT8, NAMES, decode
from pdd_tcp.sockets import Damaged

DAMAGES = 8
"""Frames that may come damaged while a fetch runs; a line or a host that spoils more is to be repaired, not retried."""


class Staged:
    """A block that came otherwise than as it lies, until it is whole."""

    def __init__(self, encoding: int, size: int) -> None:
        self.encoding, self.data = encoding, bytearray(size)
        self.had = 0
        """A bit for each frame."""


class Incoming:
    """Filled by the threads of several connections, in one session after another: from a subscription until all is
    here, or until a connection is lost. `number` in the calls below is a session's; others are ignored, as what comes
    of them is nobody's any more."""

    def __init__(
        self,
        endpoint: str,
        subscription: Subscription,
        sink: BlockSink,
        config: TcpConfig,
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called once, in any thread, when there is a result."""
        self._config = config
        self._encodings = (config.compression != "off") * BLOSC2 | (config.quantize != "off") * INT8
        """Flags of those that are asked for."""
        self._met: set[int] = set()
        self.endpoint, self.subscription = endpoint, subscription
        self._sink, self._ended = sink, ended
        self._begun = now()
        self.until = self._begun + subscription.deadline
        self.late = f"the deadline of {subscription.deadline:g} s has passed"
        self._size = subscription.layout.block_bytes
        self._lock = threading.Lock()
        self._missing = dict.fromkeys(range(len(subscription.blocks)))
        """Their positions in `subscription.blocks`, by which the sink knows them."""
        self._had: dict[int, int] = {}
        """By position, of blocks of which something is here: a bit for each frame."""
        self._frame = 0
        self._blocks = self._gone = self._resumed = self._damages = 0
        self.trouble = ""
        """Why a connection was lost, the last time."""
        self._error: BaseException | None = None
        self._over = False
        # Of the session that runs:
        self._number = 0
        self._digest: bytes | None = None
        self._positions: list[int] = []
        self._claimed: dict[int, int] = {}
        self._staged: dict[int, Staged] = {}
        self._latest = -1, memoryview(b"")

    @property
    def over(self) -> bool:
        """There is a result, and the sink is its owner's."""
        return self._over

    @property
    def size(self) -> int:
        """Bytes that are not here, more or less."""
        return len(self._missing) * self._size

    @property
    def cut_short(self) -> bool:
        """It is over, and the sender may not know."""
        return self._error is not None

    def result(self) -> TransferReport:
        """What it did, once it is over; raises what has ended it."""
        if self._error is not None:
            raise self._error
        return TransferReport(
            bytes=self._blocks * self._size,
            blocks=self._blocks,
            gone=self._gone,
            seconds=now() - self._begun,
            resumed=self._resumed,
            encoding="; ".join(NAMES[each] for each in sorted(self._met) if each),
        )

    # Sessions

    def subscribe(self, channel: bytes, number: int, frame: int) -> wire.Subscribe:
        """Begin a session, in frames of `frame` bytes, for what is missing."""
        with self._lock:
            if frame != self._frame:
                self._frame = frame
                self._had.clear()
            self._clear(number)
            self._positions = list(self._missing)
            self._claimed = dict(self._had)
            self._per_block = wire.frames_of(self._size, frame)
            self._sums = array("Q", bytes(8 * self._per_block * len(self._positions)))
            self._binding = wire.Binding(channel, number, self.subscription.request_id)
            self._names = [self.subscription.blocks[position].name for position in self._positions]
            nbytes = (self._per_block + 7) // 8
            partial = {
                index: self._had[position].to_bytes(nbytes, "little")
                for index, position in enumerate(self._positions)
                if position in self._had
            }
            subscription = msgspec.structs.replace(
                self.subscription,
                blocks=tuple(self.subscription.blocks[position] for position in self._positions),
                deadline=max(0.001, self.until - now()),
            )
            compression, quantize = self._config.compression, self._config.quantize
            return wire.Subscribe.of(subscription, number, partial, now() - self._begun, compression, quantize)

    def cut(self) -> None:
        """A connection that carried its session was lost."""
        with self._lock:
            self._resumed += 1

    def settle(self) -> None:
        """No more comes of its session."""
        with self._lock:
            self._clear(0)
            if not self._missing:
                self._finish(None)

    def damaged(self) -> None:
        """A frame came damaged on a connection that carried its session."""
        with self._lock:
            self._damages += 1
            if self._damages > DAMAGES:
                self._finish(self._failure(f"{self._damages} frames came damaged"))

    # Frames, in connections' threads

    def claim(self, frame: wire.Frame) -> memoryview | None:
        """Where a frame's payload goes: nobody else writes there, and no byte is written before. None where the fetch
        is over. Raises `Damaged` for a frame that was not asked for."""
        with self._lock:
            if self._over or frame.fetch != self._number:
                return None
            position = self._position(frame)
            start = frame.part * self._frame
            plain = frame.encoding == AS_IT_LIES
            fits = frame.size == self._size if plain else frame.size < self._size
            if not fits or start >= frame.size or frame.length != min(self._frame, frame.size - start):
                raise Damaged(f"{frame.length} bytes at {start} of {frame.size}, where a block has {self._size}")
            if frame.encoding & ~self._encodings:
                raise Damaged(f"a block in an encoding that was not asked for: {frame.encoding}")
            claimed, bit = self._claimed.get(position, 0), 1 << frame.part
            if position not in self._missing or claimed & bit:
                raise Damaged(f"block {position} came twice")
            self._claimed[position] = claimed | bit
            if not plain:
                return self._stage(position, frame)[start : start + frame.length]
            try:
                return self._memory(position)[start : start + frame.length]
            except Exception as error:
                self._finish(error)
                return None

    def landed(self, frame: wire.Frame) -> None:
        """A payload is where it was claimed, and is what its checksum says."""
        with self._lock:
            if self._over or frame.fetch != self._number:
                return
            position = self._positions[frame.block]
            self._sums[frame.block * self._per_block + frame.part] = frame.body
            self._met.add(frame.encoding)
            try:
                if not (self._decoded(position, frame) if frame.encoding else self._whole(position, frame)):
                    return
                self._sink.done(position)
            except Damaged:
                raise
            except Exception as error:
                self._finish(error)
                return
            del self._missing[position]
            self._blocks += 1
            self._check()

    def gone(self, frame: wire.Frame) -> None:
        """A block will not come."""
        with self._lock:
            if self._over or frame.fetch != self._number:
                return
            position = self._position(frame)
            if self._claimed.get(position, 0) != self._had.get(position, 0) or position not in self._missing:
                raise Damaged(f"block {position} came, and is gone")
            self._had.pop(position, None)
            del self._missing[position]
            self._gone += 1
            self._check()

    def end(self, frame: wire.Frame, digest: bytes) -> None:
        """The sender has sent all."""
        with self._lock:
            if self._over or frame.fetch != self._number:
                return
            if frame.bind != self._binding.session:
                raise Damaged("the end of another request")
            self._digest = digest
            self._check()

    def refuse(self, frame: wire.Frame, error: PddError) -> None:
        """The sender gives the fetch up."""
        with self._lock:
            if self._over or frame.fetch != self._number:
                return
            if frame.bind != self._binding.session:
                raise Damaged("an error of another request")
            if isinstance(error, DeadlineExceeded):
                error = self._failure(self.late)
            elif not isinstance(error, LayoutError | TransferError):
                error = TransferError(
                    "the sender gave the transfer up", where=error.where, why=error.what, fix=error.fix
                )
            self._finish(error)

    # Ends

    def stop(self, why: str) -> None:
        """Any thread: end it, unless it has ended."""
        with self._lock:
            self._finish(self._failure(why))

    def fail(self, error: BaseException) -> None:
        """Any thread: end it so, unless it has ended."""
        with self._lock:
            self._finish(error)

    def _clear(self, number: int) -> None:
        self._number = number
        self._digest = None
        self._positions, self._claimed, self._staged = [], {}, {}
        self._latest = -1, memoryview(b"")

    def _memory(self, position: int) -> memoryview:
        """All of a block's. The last one's is kept for its other frames."""
        if self._latest[0] == position:
            return self._latest[1]
        memory = self._sink.memory(position).cast("B")
        if len(memory) != self._size:
            raise ValueError(f"the sink has {len(memory)} bytes for block {position}, and the layout {self._size}")
        self._latest = position, memory
        return memory

    def _stage(self, position: int, frame: wire.Frame) -> memoryview:
        staged = self._staged.setdefault(position, Staged(frame.encoding, frame.size))
        if (staged.encoding, len(staged.data)) != (frame.encoding, frame.size) or position in self._had:
            raise Damaged(f"block {position} came in two ways")
        return memoryview(staged.data)

    def _whole(self, position: int, frame: wire.Frame) -> bool:
        """Whether this frame was its last one."""
        if position in self._staged:
            raise Damaged(f"block {position} came in two ways")
        had = self._had.get(position, 0) | 1 << frame.part
        if had.bit_count() < self._per_block:
            self._had[position] = had
            return False
        self._had.pop(position, None)
        return True

    def _decoded(self, position: int, frame: wire.Frame) -> bool:
        """The same of one that is staged; it is in the sink's memory then."""
        staged = self._staged[position]
        staged.had |= 1 << frame.part
        if staged.had.bit_count() < wire.frames_of(frame.size, self._frame):
            return False
        del self._staged[position]
        memory = self._memory(position)
        try:
            decode(staged.encoding, staged.data, memory, self.subscription.layout)
        except ValueError as error:
            raise Damaged(f"block {position} cannot be decoded: {error}") from error
        return True

    def _position(self, frame: wire.Frame) -> int:
        if frame.block >= len(self._positions):
            raise Damaged(f"a frame for block {frame.block} of {len(self._positions)}")
        if frame.bind != self._binding.block(self._names[frame.block]):
            raise Damaged("a frame of another request, or of another block than it says")
        if frame.part >= self._per_block:
            raise Damaged(f"frame {frame.part} of {self._per_block}")
        return self._positions[frame.block]

    def _check(self) -> None:
        if self._missing or self._digest is None:
            return
        right = self._digest == wire.digest(self._sums)
        self._finish(None if right else self._failure("the checksum of all its frames is not the sender's"))

    def _finish(self, error: BaseException | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._ended()

    def _failure(self, why: str) -> TransferError:
        return incomplete(self.subscription, self.endpoint, self._blocks + self._gone, why, self.trouble)
