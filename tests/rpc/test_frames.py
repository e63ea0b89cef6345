from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc.frames import FRAME_LIMIT, Frame, FrameDecoder, Item, cost, encode, pack, payload_decoder
from tests.rpc.any_frames import frames


def same(one: Frame, two: Frame) -> bool:
    """Payloads are views into what was read; compare frames by their bytes."""
    return encode(one) == encode(two)


@given(st.lists(frames, max_size=8), st.data())
def test_any_frames_cut_anywhere_come_out_as_they_went_in(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = FrameDecoder(FRAME_LIMIT)
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
    assert len(got) == len(sent)
    assert all(map(same, got, sent))


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_garbage_is_refused_by_an_rpc_error_and_nothing_else(chunks: list[bytes]) -> None:
    decoder = FrameDecoder(1000)
    try:
        for chunk in chunks:
            list(decoder.feed(chunk))
    except RpcError:
        return


@given(frames, st.data())
def test_a_frame_with_flipped_bytes_is_read_or_refused_but_never_crashes(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(encode(frame))
    for at in data.draw(st.lists(st.integers(4, len(raw) - 1), min_size=1, max_size=4)) if len(raw) > 4 else []:
        raw[at] ^= data.draw(st.integers(1, 255))
    try:
        list(FrameDecoder(FRAME_LIMIT).feed(bytes(raw)))
    except RpcError:
        return


def test_nesting_deeper_than_the_stack_is_refused() -> None:
    body = b"\x93\x03\x01" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(RpcError, match="no frame"):
        list(FrameDecoder(FRAME_LIMIT).feed(len(body).to_bytes(4, "big") + body))


def test_a_frame_that_comes_in_tiny_pieces_takes_little_more_memory_than_it_has_bytes() -> None:
    length = 400_000
    decoder = FrameDecoder(FRAME_LIMIT)
    list(decoder.feed(length.to_bytes(4, "big")))
    tracemalloc.start()
    for _ in range(length // 2 - 1):
        assert not list(decoder.feed(bytes([1, 2])))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 * length


def test_a_frame_over_the_limit_is_refused_before_it_is_sent() -> None:
    encode(Item(1, pack(bytes(FRAME_LIMIT - 100))))
    with pytest.raises(RpcError, match=f"over the limit of {FRAME_LIMIT}"):
        encode(Item(1, pack(bytes(FRAME_LIMIT))))


def test_a_frame_over_the_limit_is_refused_at_its_length_without_waiting_for_the_rest() -> None:
    with pytest.raises(RpcError, match=f"{FRAME_LIMIT + 1} bytes"):
        list(FrameDecoder(FRAME_LIMIT).feed((FRAME_LIMIT + 1).to_bytes(4, "big")))


def test_a_payload_of_another_type_is_an_rpc_error_that_says_what_it_was() -> None:
    with pytest.raises(RpcError, match=r"an item of engine\.decode cannot be read"):
        payload_decoder(int).decode(pack("three"), "an item of engine.decode")


def test_a_payload_is_read_straight_into_a_union_of_tagged_structs() -> None:
    class One(msgspec.Struct, tag="one"):
        n: int

    class Two(msgspec.Struct, tag="two"):
        n: int

    assert payload_decoder(One | Two).decode(pack(Two(3)), "it") == Two(3)


def test_a_big_item_costs_more_credit_than_a_small_one() -> None:
    assert cost(pack(1)) == 1
    assert cost(pack(bytes(160 * 1024))) == 11
