from __future__ import annotations

import msgspec
import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import (
    OFFER_LIMIT,
    DecodeRequest,
    ModelSpec,
    Offer,
    OfferRequest,
    ReceiveRequest,
    Sampling,
)
from pdd_runtime.testing.scripted import ScriptedEngine

PARAMS = {"remote_block_ids": [[0, 7]], "remote_host": "10.0.0.1", "nested": {"bytes": b"\0\xff"}, "none": None}


def test_an_offer_crosses_the_message_plane_whole() -> None:
    request = ReceiveRequest(id="r", tokens=(1, 2), sampling=Sampling(), offer=Offer(PARAMS), timeout=3.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ReceiveRequest) == request
    decode = DecodeRequest(id="r", tokens=(1,), prompt_tokens=1, max_tokens=1, sampling=Sampling(), offer=Offer(PARAMS))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(decode), type=DecodeRequest) == decode


def test_an_offer_has_a_size_that_it_cannot_exceed() -> None:
    largest = Offer({"x": b"\0" * (OFFER_LIMIT - 16)})
    with pytest.raises(ValueError, match="over the limit of 65536"):
        Offer({"x": b"\0" * OFFER_LIMIT})
    packed = msgspec.msgpack.encode(largest)
    assert msgspec.msgpack.decode(packed, type=Offer) == largest
    with pytest.raises(msgspec.ValidationError, match="over the limit"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"params": {"x": b"\0" * OFFER_LIMIT}}), type=Offer)


async def test_an_engine_with_portable_kv_refuses_native_steps() -> None:
    engine = ScriptedEngine(ScriptedEngine.Config(), ModelSpec(source="script"))
    with pytest.raises(EngineError, match="scripted has portable KV"):
        engine.offer(OfferRequest(id="r", tokens=(1,), sampling=Sampling(), reader="main", timeout=1.0))
    with pytest.raises(EngineError, match="scripted has portable KV"):
        engine.receive(ReceiveRequest(id="r", tokens=(1,), sampling=Sampling(), offer=Offer({}), timeout=1.0))
