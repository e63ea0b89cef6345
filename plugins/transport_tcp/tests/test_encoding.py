"""Compressed blocks come back as they were, quantised ones nearly so, and only where both sides ask for it."""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.encoding import AS_IT_LIES, BLOSC2, INT8, Encoder, decode, quantised_bytes
from pdd_tcp.incoming import Incoming
from pdd_tcp.sockets import Damaged

from pdd_runtime.errors import PluginError
from pdd_runtime.kv import Block, KvLayout
from pdd_runtime.kv.cast import cast
from pdd_runtime.plugins.transport import LinkFacts, TransferReport
from pdd_runtime.rpc import Line
from pdd_runtime.testing.kv_parties import StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from plugins.transport_tcp.tests.counting import Party

LAYOUT = KvLayout(layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
LAYOUTS = st.builds(
    lambda dtype, axes, tp_size, state_bytes: msgspec.structs.replace(
        LAYOUT, dtype=dtype, axes="".join(axes), tp_size=tp_size, state_bytes=state_bytes
    ),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.permutations("lkthd"),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 32]),
)
FEW = settings(deadline=None, max_examples=30)


def kv(layout: KvLayout, seed: int) -> bytearray:
    """A block of numbers of channels of very different sizes, as keys are."""
    chance = np.random.default_rng(seed)
    memory = bytearray(layout.block_bytes)
    target = layout.elements(memoryview(memory))
    channels = np.exp(chance.normal(0, 2, (target.shape[0], 2, 1, *target.shape[3:])))
    numbers = (chance.standard_normal(target.shape) * channels).astype(np.float32)
    cast(numbers.view(np.uint32), "float32", target, layout.dtype)
    layout.state(memoryview(memory))[:] = chance.bytes(layout.state_bytes)
    return memory


def floats(layout: KvLayout, memory: bytearray) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    bits = layout.elements(memoryview(memory))
    wide = np.empty(bits.shape, np.uint32)
    cast(bits, layout.dtype, wide, "float32")
    return wide.view(np.float32)


def crossed(encoder: Encoder, memory: bytearray, layout: KvLayout, tokens: int) -> tuple[int, bytes, bytearray]:
    flags, data = encoder.encode(memoryview(memory), tokens)
    landed = bytearray(layout.block_bytes)
    decode(flags, bytes(data), memoryview(landed), layout) if flags else None
    return flags, bytes(data), landed


@FEW
@given(LAYOUTS, st.integers(0, 100))
def test_compression_loses_nothing(layout: KvLayout, seed: int) -> None:
    pytest.importorskip("blosc2")
    memory = kv(layout, seed)
    flags, data, landed = crossed(Encoder(layout, compress=True, quantize=False), memory, layout, layout.block_size)
    assert flags == BLOSC2
    assert len(data) < len(memory)
    assert landed == memory


def test_what_compression_makes_no_smaller_is_sent_as_it_lies() -> None:
    pytest.importorskip("blosc2")
    memory = bytearray(np.random.default_rng(0).bytes(LAYOUT.block_bytes))
    flags, data = Encoder(LAYOUT, compress=True, quantize=False).encode(memoryview(memory), 16)
    assert (flags, data) == (AS_IT_LIES, memory)


@FEW
@given(LAYOUTS, st.integers(0, 100), st.integers(1, 16), st.booleans())
def test_a_quantised_number_is_off_by_half_a_step_of_its_channel(
    layout: KvLayout, seed: int, tokens: int, compress: bool
) -> None:
    if compress:
        pytest.importorskip("blosc2")
    memory = kv(layout, seed)
    encoder = Encoder(layout, compress=compress, quantize=True)
    flags, data, landed = crossed(encoder, memory, layout, tokens)
    assert flags & INT8
    assert len(data) <= quantised_bytes(layout) < 0.6 * layout.block_bytes
    before, after = (floats(layout, each)[:, :, :tokens] for each in (memory, landed))
    peak = np.abs(before).max(axis=2, keepdims=True)
    # Half a step, the rounding of scale and dtype, and the smallest scale that there is.
    bound = 0.51 * peak / 127 + 0.005 * np.abs(before) + 1e-7 * peak.max(axis=(3, 4, 5), keepdims=True)
    assert (np.abs(after - before) <= bound).all()
    assert not floats(layout, landed)[:, :, tokens:].any(), "behind the tokens in use there is nothing"
    assert layout.state(memoryview(landed)) == layout.state(memoryview(memory))


def test_quantising_is_off_by_less_than_a_hundredth_of_a_channel() -> None:
    memory = kv(LAYOUT, 1)
    _, _, landed = crossed(Encoder(LAYOUT, compress=False, quantize=True), memory, LAYOUT, 16)
    before, after = floats(LAYOUT, memory), floats(LAYOUT, landed)
    assert np.sqrt(np.square((after - before) / before.std(axis=2, keepdims=True)).mean()) < 0.01


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_without_a_scale_are_sent_as_they_lie(number: float) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype="float32")
    memory = kv(layout, 0)
    layout.elements(memoryview(memory))[0, 0, 3, 0, 0, 0] = np.float32(number).view(np.uint32)
    assert Encoder(layout, compress=False, quantize=True).encode(memoryview(memory), 16)[0] == AS_IT_LIES
    assert Encoder(layout, compress=False, quantize=True).encode(memoryview(memory), 3)[0] == INT8, "it is not in use"


@FEW
@given(st.sampled_from([BLOSC2, INT8, INT8 | BLOSC2]), st.binary(max_size=200))
def test_bytes_that_are_no_block_are_refused_and_nothing_worse(flags: int, data: bytes) -> None:
    pytest.importorskip("blosc2")
    with pytest.raises(ValueError, match=r"bytes|no compressed block"):
        decode(flags, data, memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT)


@pytest.mark.parametrize(
    ("part", "size", "length"),
    [(2, 8192, 0), (3, 8192, 4096), (1, 8192, 100), (0, LAYOUT.block_bytes, 4096), (0, 0, 0)],
)
def test_a_frame_that_is_no_part_of_an_encoded_block_is_damaged(part: int, size: int, length: int) -> None:
    wanted, channel = sequence(2, LAYOUT), bytes(16)
    config = TcpConfig(quantize="int8-channel")
    fetch = Incoming("host:1", subscription(wanted, layout=LAYOUT), StoreSink(wanted, LAYOUT), config, lambda: None)
    fetch.subscribe(channel, 1, 4096)
    bind = wire.Binding(channel, 1, "req-1").block(wanted[0].name)
    good = wire.Frame(wire.DATA, INT8, 1, 0, 1, 4096, 8192, bind, 0)
    assert fetch.claim(good) is not None
    with pytest.raises(Damaged):
        fetch.claim(good._replace(part=part, size=size, length=length))


# Two sides


class KvSource(StoreSource):
    """Blocks of KV, rather than of their names."""

    def make_kv(self, blocks: list[Block]) -> dict[bytes, bytes]:
        self.make(blocks)
        made = {}
        for number, block in enumerate(blocks):
            found = self.store.find(block.name)
            assert found is not None
            self.store.memory(found)[:] = kv(self.layout, number)
            made[block.name] = bytes(self.store.memory(found))
        return made


async def fetched(
    party: Party, sends: dict[str, object], receives: dict[str, object], *faults: Fault | None, bandwidth: float = 0.0
) -> tuple[TransferReport, bool, int]:
    """The report, whether all came as it was, and the bytes that crossed."""
    source, wanted = KvSource(LAYOUT), sequence(12, LAYOUT)
    made = source.make_kv(wanted)
    links = {name: LinkFacts("wan", bandwidth, 0.001, 1) for name in ("dc-a", "dc-b")} if bandwidth else None
    sender = party("dc-a", links=links, **sends)
    sink = StoreSink(wanted, LAYOUT)
    async with TcpProxy(await sender.serve(source, "127.0.0.1"), *faults) as proxy:
        asked = subscription(wanted, layout=LAYOUT)
        report = await party("dc-b", links=links, **receives).fetch(proxy.endpoint, asked, sink)
        assert sorted(sink.arrived) == list(range(12))
        same = all(sink.memory(index) == made[block.name] for index, block in enumerate(wanted))
        return report, same, proxy.passed


SIZE = 12 * LAYOUT.block_bytes


async def test_the_receiver_asks_for_compression_and_the_report_says_so(party: Party) -> None:
    pytest.importorskip("blosc2")
    report, same, passed = await fetched(party, {}, {"compression": "blosc2"})
    assert same
    assert report.encoding == "blosc2"
    assert report.bytes == SIZE
    assert passed < 0.85 * SIZE


@pytest.mark.parametrize(("bandwidth", "encoding"), [(0.0, ""), (2e9, ""), (1e9, "blosc2")])
async def test_auto_compresses_on_slow_links_alone(party: Party, bandwidth: float, encoding: str) -> None:
    pytest.importorskip("blosc2")
    report, same, _ = await fetched(party, {}, {"compression": "auto"}, bandwidth=bandwidth)
    assert same
    assert report.encoding == encoding


@pytest.mark.parametrize("sends", ["off", "int8-channel"])
@pytest.mark.parametrize("receives", ["off", "int8-channel"])
async def test_only_where_both_sides_agree_bits_are_lost(party: Party, sends: str, receives: str) -> None:
    report, same, passed = await fetched(party, {"quantize": sends}, {"quantize": receives})
    agreed = sends == receives == "int8-channel"
    assert report.encoding == ("int8-channel (lossy)" if agreed else "")
    assert same is not agreed
    assert (passed < 0.6 * SIZE) is agreed


async def test_both_at_once(party: Party) -> None:
    pytest.importorskip("blosc2")
    both = {"quantize": "int8-channel", "compression": "blosc2"}
    report, _, passed = await fetched(party, both, both)
    assert "lossy" in report.encoding
    assert passed < 0.6 * SIZE


@pytest.mark.parametrize("kind", ["cut", "flip"])
async def test_an_encoded_fetch_is_resumed(party: Party, kind: str) -> None:
    fault = Fault("cut" if kind == "cut" else "flip", SIZE // 4)
    plain = {"quantize": "int8-channel"}
    report, _, _ = await fetched(party, plain, {**plain, "retry_delay": "1ms"}, fault)
    assert report.resumed == 1
    assert report.blocks == 12


async def test_encoded_blocks_cross_an_emulated_line(party: Party) -> None:
    source, wanted = KvSource(LAYOUT), sequence(12, LAYOUT)
    source.make_kv(wanted)
    sender = party("dc-a", {"dc-b": Line(200e6, delay=0.005)}, quantize="int8-channel")
    sink = StoreSink(wanted, LAYOUT)
    endpoint = await sender.serve(source, "127.0.0.1")
    asked = subscription(wanted, layout=LAYOUT)
    report = await party("dc-b", quantize="int8-channel").fetch(endpoint, asked, sink)
    assert report.blocks == 12
    (link,) = sender.telemetry()
    assert link.queue == 0
    assert link.sent == 12 * quantised_bytes(LAYOUT)


async def test_cancelling_while_blocks_are_encoded_frees_all(party: Party) -> None:
    source, wanted = KvSource(LAYOUT), sequence(40, LAYOUT)
    source.make_kv(wanted)
    endpoint = await party("dc-a", quantize="int8-channel").serve(source, "127.0.0.1")
    receiver = party("dc-b", quantize="int8-channel")
    for number in range(10):
        fetch = receiver.fetch(endpoint, subscription(wanted, layout=LAYOUT), StoreSink(wanted, LAYOUT))
        transfer = asyncio.create_task(fetch)
        await asyncio.sleep(number * 0.002)
        transfer.cancel()
        await asyncio.wait([transfer])
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0


async def test_without_the_package_compression_is_an_error_with_a_hint_or_off(
    party: Party, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    with pytest.raises(PluginError, match="needs the package blosc2") as error:
        party("dc-b", compression="blosc2")
    assert 'pip install "pdd-tcp[compression]"' in error.value.fix
    with caplog.at_level(logging.WARNING):
        report, same, _ = await fetched(party, {}, {"compression": "auto"}, bandwidth=1e6)
    assert "compression: auto stays off" in caplog.text
    assert same
    assert report.encoding == ""


async def test_a_lossy_setting_is_named_as_such_at_the_start(party: Party, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        party("dc-b", quantize="int8-channel")
    assert "lossy" in caplog.text
