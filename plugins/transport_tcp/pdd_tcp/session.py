"""One subscription on the sending side: the blocks that it has been fed, cut into frames."""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections import deque
from collections.abc import Sequence

from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import Feed, Ready, Subscription
from pdd_tcp import wire
from pdd_tcp.encoding import AS_IT_LIES, Encoder
from pdd_tcp.scheduler import Transfer

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """One that has been fed and has frames to send."""

    session: Session
    index: int
    memory: memoryview
    """As it is written on the wire."""
    bind: int
    parts: deque[int]
    """The frames to hand out."""
    unwritten: int
    """Frames that are not the kernel's yet."""
    since: float
    """When it was fed."""
    encoder: Encoder | None = None
    """Where it is to be encoded first."""
    encoding: int = AS_IT_LIES

    def encode(self) -> None:
        """Read its memory, and write it anew where that makes it smaller."""
        encoder, self.encoder = self.encoder, None
        if encoder is not None:
            try:
                self.encoding, self.memory = encoder.encode(self.memory, self.session.tokens(self.index))
            except Exception:
                log.exception("pdd-tcp: a block of request %s goes as it lies", self.session.request_id)


@dataclasses.dataclass(slots=True, eq=False)
class Piece:
    """A frame that is handed out for sending."""

    block: Block
    part: int
    view: memoryview
    header: bytes = b""
    body: int = 0

    def seal(self) -> bytes:
        """Read its memory for the checksum, and write its header."""
        block, self.body = self.block, wire.checksum_of(self.view)
        number, size, length = block.session.number, len(block.memory), len(self.view)
        self.header = wire.seal(
            wire.DATA, block.bind, number, block.index, self.part, size, block.encoding, length, self.body
        )
        return self.header

    @property
    def session(self) -> Session:
        return self.block.session


class Session(Transfer):
    """All under the link's lock, but for what is said to be for one thread. Its pins are dropped, by closing the feed,
    when the last of its holders has let go."""

    def __init__(
        self,
        channel: bytes,
        asked: wire.Subscribe,
        subscription: Subscription,
        feed: Feed,
        frame: int,
        encoder: Encoder | None = None,
    ) -> None:
        self._encoder = encoder
        self._tokens = [block.tokens for block in subscription.blocks]
        self._names = [block.name for block in subscription.blocks]
        self._bytes_per_block, self._frame = subscription.layout.block_bytes, frame
        self._per_block = wire.frames_of(self._bytes_per_block, frame)
        self._had = {index: int.from_bytes(bits, "little") for index, bits in asked.partial.items()}
        size = subscription.behind + sum(self._bytes(index) for index in range(len(self._names)))
        super().__init__(size, now() - asked.waited, subscription.priority)
        self.number, self.request_id, self.feed = asked.number, asked.request_id, feed
        self.until = now() + subscription.deadline
        self.binding = wire.Binding(channel, asked.number, asked.request_id)
        self.closed = False
        self.blocks: deque[Block] = deque()
        """Those with frames to hand out."""
        self.queued = 0
        """Bytes that have been fed and are not the kernel's yet."""
        self.unfed = len(self._names)
        """Blocks of which the feed has said nothing yet."""
        self._sums = array("Q", bytes(8 * self._per_block * len(self._names)))
        self._unsealed = 0
        self._unwritten = 0
        self._holders = 1

    def tokens(self, index: int) -> int:
        """How many of a block's are in use."""
        return self._tokens[index]

    def hold(self) -> None:
        """Somebody more needs the feed or what it gives."""
        self._holders += 1

    def release(self) -> bool:
        """One needs it no more; True for the last one, who is to close the feed."""
        self._holders -= 1
        return not self._holders

    def fed(self, item: Ready) -> tuple[int, int]:
        """A block can be sent; returns how many frames and bytes that makes. Raises `TransferError` for a wrong
        size."""
        memory = item.memory.cast("B")
        if len(memory) != self._bytes_per_block:
            raise TransferError(
                "a block of the wrong size was to be sent",
                where=self.request_id,
                why=f"{len(memory)} bytes, where the receiver's layout has {self._bytes_per_block}",
            )
        parts = deque(self._missing(item.index))
        self.unfed -= 1
        bind = self.binding.block(self._names[item.index])
        if parts:
            # What began to cross as it lies goes on so.
            encoder = None if item.index in self._had else self._encoder
            self.blocks.append(Block(self, item.index, memory, bind, parts, len(parts), now(), encoder))
        self._unsealed += len(parts)
        nbytes = self._bytes(item.index)
        self.queued += nbytes
        return len(parts), nbytes

    def gone(self, index: int) -> bytes:
        """The frame that says so."""
        self.unfed -= 1
        self.left -= self._bytes(index)
        return wire.pack_frame(wire.GONE, self.binding.block(self._names[index]), fetch=self.number, block=index)

    def take(self) -> Piece | Block:
        """The next frame, of those that wait; or the block, to be encoded before it has any."""
        block = self.blocks[0]
        if block.encoder is not None:
            return self.blocks.popleft()
        part = block.parts.popleft()
        if not block.parts:
            self.blocks.popleft()
        view = block.memory[part * self._frame : (part + 1) * self._frame]
        self._unwritten += 1
        return Piece(block, part, view)

    def encoded(self, block: Block) -> int:
        """It has been; returns how many bytes less that makes."""
        parts = wire.frames_of(len(block.memory), self._frame)
        self._unsealed += parts - len(block.parts)
        block.parts, block.unwritten = deque(range(parts)), parts
        self.blocks.appendleft(block)
        saved = self._bytes_per_block - len(block.memory)
        self.left -= saved
        self.queued -= saved
        return saved

    def sealed(self, piece: Piece) -> bytes:
        """Note its checksum. After the last frame: the one that ends the fetch, else nothing."""
        self._sums[piece.block.index * self._per_block + piece.part] = piece.body
        self._unsealed -= 1
        return self.end()

    def written(self, piece: Piece) -> bool:
        """Its bytes are the kernel's; True when all of its block are."""
        self.queued -= len(piece.view)
        self._unwritten -= 1
        piece.block.unwritten -= 1
        return not piece.block.unwritten

    @property
    def over(self) -> bool:
        """Nothing is left to do."""
        return not (self.unfed or self._unsealed or self._unwritten)

    def end(self) -> bytes:
        """When all is handed out and sealed: the frame that ends the fetch, else nothing."""
        if self.unfed or self._unsealed:
            return b""
        digest = wire.digest(self._sums)
        return wire.pack_frame(wire.END, self.binding.session, fetch=self.number, payload=digest) + digest

    def _missing(self, index: int) -> Sequence[int]:
        had, every = self._had.get(index), range(self._per_block)
        return every if had is None else [part for part in every if not had >> part & 1]

    def _bytes(self, index: int) -> int:
        if index not in self._had:
            return self._bytes_per_block
        return sum(min(self._frame, self._bytes_per_block - part * self._frame) for part in self._missing(index))
