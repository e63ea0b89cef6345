from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc.frames import (
    FRAME_LIMIT,
    Bye,
    Call,
    Cancel,
    Credit,
    End,
    Failure,
    Frame,
    FrameDecoder,
    Hello,
    Item,
    Ping,
    Result,
    cost,
    encode,
    pack,
    payload_decoder,
)
from pdd_runtime.rpc.greeting import Greeting

ids = st.integers(0, 2**63)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
).map(pack)
frames = st.one_of(
    st.builds(Call, ids, st.text(), payloads, st.none() | st.floats(0, 1e9), st.booleans()),
    st.builds(Result, ids, payloads),
    st.builds(Item, ids, payloads),
    st.builds(End, ids),
    st.builds(Failure, ids, st.dictionaries(st.text(), st.text())),
    st.builds(Credit, ids, ids),
    st.builds(Cancel, ids),
    st.builds(Ping),
    st.builds(Bye, st.none() | st.dictionaries(st.text(), st.text())),
    st.builds(
        lambda a, b: Hello(Greeting(graph=a, secret=b, cluster=a, name=b)), st.text(max_size=99), st.text(max_size=99)
    ),
)


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
