"""The bytes of the protocol: what is written is read back, and nothing else is taken."""

from __future__ import annotations

import secrets
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdd_tcp import wire

from pdd_runtime.errors import LayoutError, TransferError
from pdd_runtime.plugins.transport import Subscription, Wanted
from pdd_runtime.testing.kv_parties import LAYOUT, sequence, subscription

CHANNEL = bytes(16)
FRAME = 1 << 12
BLOCKS = st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1)), min_size=1, max_size=20)


def read(message: bytes, limit: int = wire.MESSAGE_LIMIT) -> bytes:
    length, checksum = wire.unpack_prefix(message[: wire.PREFIX.size], limit)
    body = message[wire.PREFIX.size :]
    assert len(body) == length
    assert wire.checksum_of(body) == checksum
    return body


@given(BLOCKS, st.text(), st.floats(0.001, 1e6), st.binary(max_size=1), st.floats(0.0, 1e6))
def test_a_subscription_crosses_unchanged(
    blocks: list[tuple[bytes, int]], request_id: str, deadline: float, bits: bytes, waited: float
) -> None:
    asked = Subscription(
        request_id=request_id,
        blocks=tuple(Wanted(name, tokens) for name, tokens in blocks),
        layout=LAYOUT,
        fingerprint="f",
        epoch="e",
        cluster="c",
        secret="s",
        priority=3,
        deadline=deadline,
    )
    message = wire.unpack_message(read(wire.pack(wire.Subscribe.of(asked, 7, {0: bits}, waited))))
    assert isinstance(message, wire.Subscribe)
    assert (message.number, message.partial, message.waited) == (7, {0: bits}, waited)
    assert message.subscription("c", FRAME) == asked


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(data: bytes) -> None:
    for reads in (wire.unpack_message, wire.unpack_answer, wire.unpack_error):
        try:
            reads(data)
        except TransferError as error:
            assert "cannot be meant" in error.what  # noqa: PT017 - most data raises, some is a message
        else:
            assert data[:1] not in (b"", b"\xc1")


def changed(**change: object) -> wire.Subscribe:
    return msgspec.structs.replace(wire.Subscribe.of(subscription(sequence(1)), 1), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"names": b""},
        {"names": bytes(17)},
        {"tokens": bytes(3)},
        {"tokens": bytes(8)},
        {"deadline": float("nan")},
        {"deadline": float("inf")},
        {"deadline": -1.0},
        {"waited": float("nan")},
        {"partial": {1: b"\x01"}},
        {"partial": {-1: b"\x01"}},
        {"partial": {0: bytes(2)}},
        {"layout": msgspec.structs.replace(LAYOUT, layers=0)},
        {"layout": msgspec.structs.replace(LAYOUT, layers=1 << 40)},
    ],
)
def test_a_subscription_that_cannot_be_meant_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="cannot be meant"):
        changed(**change).subscription("dc-b", FRAME)


def test_a_list_longer_than_any_prompt_is_refused_before_it_is_built() -> None:
    count = wire.BLOCKS_LIMIT + 1
    with pytest.raises(TransferError, match="no list of blocks"):
        changed(names=bytes(16 * count), tokens=bytes(4 * count)).subscription("dc-b", FRAME)


def test_another_protocol_version_or_length_is_refused_with_the_reason() -> None:
    for prefix, why in (
        (wire.PREFIX.pack(b"HTTP", 2, 0, 0), "does not speak this protocol"),
        (wire.PREFIX.pack(wire.MAGIC, 9, 0, 0), "version 9 of the protocol, and this side version 2"),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 1 << 30, 0), "1073741824 bytes, where 65536 are allowed"),
    ):
        with pytest.raises(TransferError, match=why):
            wire.unpack_prefix(prefix, wire.HELLO_LIMIT)


def test_an_error_keeps_its_class_and_fits_however_long_it_is() -> None:
    error = LayoutError("x" * 1_000_000, where="w" * 100_000, why="y" * 100_000)
    body = wire.pack_error(error)
    assert len(body) < wire.ANSWER_LIMIT
    again = wire.unpack_error(body)
    assert isinstance(again, LayoutError)
    assert again.what.startswith("xxx")


@given(st.binary(min_size=1, max_size=100), st.integers(0, 2**32 - 1), st.data())
def test_a_frame_is_intact_only_with_every_bit(payload: bytes, block: int, data: st.DataObject) -> None:
    bind = wire.Binding(CHANNEL, 1, "req-1").block(b"n" * 16)
    header = wire.pack_frame(wire.DATA, bind, fetch=1, block=block, part=2, size=3, payload=payload)
    frame = wire.unpack_frame(header)
    assert frame == (wire.DATA, 0, 1, block, 2, len(payload), 3, bind, wire.checksum_of(payload))
    whole = bytearray(header + payload)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    frame = wire.unpack_frame(whole[: wire.FRAME_BYTES])
    assert frame is None or frame.body != wire.checksum_of(whole[wire.FRAME_BYTES :])


def test_a_frame_is_bound_to_its_channel_its_fetch_its_request_and_its_block() -> None:
    name, other = secrets.token_bytes(16), secrets.token_bytes(16)
    binds = {
        wire.Binding(channel, number, request).block(block)
        for channel in (CHANNEL, b"c" * 16)
        for number in (1, 2)
        for request in ("req-1", "req-2")
        for block in (name, other)
    }
    assert len(binds) == 16


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=10, unique=True))
def test_the_digest_of_a_fetch_depends_on_every_frame_and_their_order(sums: list[int]) -> None:
    digest = wire.digest(array("Q", sums))
    assert len(digest) == wire.DIGEST_BYTES
    assert digest != wire.digest(array("Q", reversed(sums)))
    assert digest != wire.digest(array("Q", [*sums[:-1], 0])) or sums[-1] == 0
