"""The bytes of the protocol: what is written is read back, and nothing else is taken."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdd_tcp import wire
from tcp_parties import LAYOUT, sequence, subscription

from pdd_runtime.errors import LayoutError, TransferError
from pdd_runtime.plugins.transport import Subscription, Wanted

FETCH = bytes(16)
BLOCKS = st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1)), min_size=1, max_size=20)


def read(message: bytes, limit: int = wire.HELLO_LIMIT) -> bytes:
    length, checksum = wire.unpack_prefix(message[: wire.PREFIX.size], limit)
    body = message[wire.PREFIX.size :]
    assert len(body) == length
    assert wire.checksum_of(body) == checksum
    return body


@given(BLOCKS, st.text(), st.floats(0.001, 1e6))
def test_a_subscription_crosses_unchanged(blocks: list[tuple[bytes, int]], request_id: str, deadline: float) -> None:
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
    hello = wire.unpack_hello(read(wire.pack(wire.Subscribe.of(asked, FETCH, 1.0))))
    assert isinstance(hello, wire.Subscribe)
    assert hello.subscription() == asked


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(data: bytes) -> None:
    for reads in (wire.unpack_hello, wire.unpack_answer, wire.unpack_error):
        try:
            reads(data)
        except TransferError as error:
            assert "cannot be meant" in error.what  # noqa: PT017 - most data raises, some is a message
        else:
            assert data[:1] not in (b"", b"\xc1")


@pytest.mark.parametrize(
    "change",
    [
        {"names": b""},
        {"names": bytes(17)},
        {"tokens": bytes(3)},
        {"tokens": bytes(8)},
        {"fetch": b"short"},
        {"beat": 0.0},
        {"beat": float("nan")},
        {"deadline": float("nan")},
        {"deadline": float("inf")},
        {"deadline": -1.0},
    ],
)
def test_a_subscription_that_cannot_be_meant_is_refused(change: dict[str, object]) -> None:
    hello = wire.Subscribe.of(subscription(sequence(1)), FETCH, 1.0)
    values = {name: getattr(hello, name) for name in hello.__struct_fields__} | change
    with pytest.raises(TransferError, match="cannot be meant"):
        wire.Subscribe(**values).subscription()


def test_a_list_longer_than_any_prompt_is_refused_before_it_is_built() -> None:
    hello = wire.Subscribe.of(subscription(sequence(1)), FETCH, 1.0)
    values = {name: getattr(hello, name) for name in hello.__struct_fields__}
    count = wire.BLOCKS_LIMIT + 1
    with pytest.raises(TransferError, match="no list of blocks"):
        wire.Subscribe(**values | {"names": bytes(16 * count), "tokens": bytes(4 * count)}).subscription()


def test_another_protocol_version_or_length_is_refused_with_the_reason() -> None:
    for prefix, why in (
        (wire.PREFIX.pack(b"HTTP", 1, 0, 0), "does not speak this protocol"),
        (wire.PREFIX.pack(wire.MAGIC, 9, 0, 0), "version 9 of the protocol, and this side version 1"),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 1 << 30, 0), "1073741824 bytes, where 67108864 are allowed"),
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
    binding = wire.Binding(FETCH, "req-1")
    header = wire.pack_frame(wire.DATA, binding.block(b"n" * 16), block=block, payload=payload)
    assert wire.unpack_frame(header)[:4] == (wire.DATA, block, len(payload), binding.block(b"n" * 16))
    assert wire.intact(header, payload)
    whole = bytearray(header + payload)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    assert not wire.intact(whole[: wire.FRAME_BYTES], whole[wire.FRAME_BYTES :])


def test_a_frame_is_bound_to_its_fetch_its_request_and_its_block() -> None:
    name, other = secrets.token_bytes(16), secrets.token_bytes(16)
    binds = {
        wire.Binding(fetch, request).block(block)
        for fetch in (FETCH, b"f" * 16)
        for request in ("req-1", "req-2")
        for block in (name, other)
    }
    assert len(binds) == 8
