"""The conformance suite for engines with native KV. Subclass it in your tests and give it two of them:

```python
class TestMyEngine(NativeConformance):
    @pytest.fixture
    def giver(self) -> Engine:
        return MyEngine(MyEngine.Config(data_plane="native"), ModelSpec(source="tiny"))

    @pytest.fixture
    def reader(self) -> Engine:
        return MyEngine(MyEngine.Config(data_plane="native"), ModelSpec(source="tiny"))
```

Neither is started; `giver` is of role prefill, `reader` of role main. They need room for 2,048 tokens and a context of
512. What is drawn, stopped and sealed is `EngineConformance`'s affair, which needs a store: run that over the portable
data plane. Here is what an engine adds where it moves KV itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import ClassVar

import pytest
import pytest_asyncio

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.kv import chain, seed
from pdd_runtime.plugins.engine import Engine, Offer, Received
from pdd_runtime.testing.engine_harness import PATIENCE, Decoded, EngineHarness


@pytest.mark.asyncio
class NativeConformance:
    """What every engine with native KV promises."""

    vocabulary: ClassVar[range] = range(3, 200)
    """Token ids that prompts may be made of."""
    frees_at_once: ClassVar[bool] = True
    """Closing an offer that nobody has read frees what it kept; not so where only a lease of the server does, which
    nobody can end."""

    @pytest.fixture
    def giver(self) -> Engine:
        raise NotImplementedError("give the suite a fixture `giver` that returns an engine, not yet started")

    @pytest.fixture
    def reader(self) -> Engine:
        raise NotImplementedError("give the suite a fixture `reader` that returns an engine, not yet started")

    @pytest_asyncio.fixture
    async def source(self, giver: Engine) -> AsyncGenerator[EngineHarness, None]:
        async with EngineHarness.started(giver, "prefill") as harness:
            yield harness

    @pytest_asyncio.fixture
    async def target(self, reader: Engine) -> AsyncGenerator[EngineHarness, None]:
        async with EngineHarness.started(reader, "main") as harness:
            yield harness

    @pytest.fixture
    def pair(self, source: EngineHarness, target: EngineHarness) -> Pair:
        return Pair(source, target)

    def prompt(self, n: int, which: int = 0) -> tuple[int, ...]:
        """`n` tokens, the same for the same `which`."""
        return tuple(random.Random(which).choices(self.vocabulary, k=n))

    # What they are

    async def test_both_say_that_their_kv_is_native_and_of_one_model(self, pair: Pair) -> None:
        for harness in (pair.source, pair.target):
            assert harness.info.capabilities.kv == "native"
            assert harness.names.layout == harness.info.layout
        assert pair.source.info.fingerprint == pair.target.info.fingerprint

    async def test_prefill_says_that_all_is_ready_and_then_the_first_token(self, pair: Pair) -> None:
        tokens = self.prompt(3 * pair.block + 3)
        prefilled = await pair.source.prefill(tokens)
        assert prefilled.ready[-1].tokens == len(tokens)
        assert prefilled.first.position == len(tokens)
        await pair.source.idle()

    async def test_the_names_of_full_blocks_become_known_and_are_no_other_tenants(self, pair: Pair) -> None:
        harness, tokens = pair.source, self.prompt(3 * pair.block + 3)
        await harness.prefill(tokens)
        layout = harness.info.layout
        full = [
            block.name
            for block in chain(seed(harness.info.fingerprint, layout.spec), tokens, layout.block_size)
            if block.tokens == layout.block_size
        ]

        async def missing() -> object:
            return [name.hex() for name in full if name not in harness.names] or None

        await harness.eventually(missing, "names are missing")
        assert await harness.engine.cached(tokens) >= len(full) * layout.block_size
        assert await harness.engine.cached(tokens, "tenant") == 0

    # From one to the other

    @pytest.mark.parametrize("blocks", [0.5, 1, 3.4, 6])
    async def test_what_is_offered_is_gone_on_with(self, pair: Pair, blocks: float) -> None:
        """The token behind it is that of the engine which made it."""
        tokens = self.prompt(max(2, int(blocks * pair.block)), int(10 * blocks))
        first = (await pair.source.prefill(tokens)).first
        decoded = await pair.bring(tokens, 6)
        assert decoded.ids[0] == first.id
        assert len(decoded.ids) == 6
        # And so is the one behind what the reader has made.
        again = await pair.source.prefill((*tokens, *decoded.ids[:3]))
        assert again.first.id == decoded.ids[3]
        await pair.idle()

    async def test_an_offer_may_go_beyond_what_its_engine_has_computed(self, pair: Pair) -> None:
        """Tokens that were made elsewhere: the giver extends over them."""
        tokens = self.prompt(2 * pair.block + 3)
        first = (await pair.source.prefill(tokens)).first
        decoded = await pair.bring((*tokens, first.id), 4)
        known = (*tokens, first.id, *decoded.ids)
        again = await pair.bring(known, 2)
        assert again.ids[0] == (await pair.source.prefill(known)).first.id
        await pair.idle()

    async def test_a_second_reader_has_an_offer_of_its_own(self, pair: Pair) -> None:
        tokens = self.prompt(3 * pair.block, 4)
        first = (await pair.source.prefill(tokens)).first
        for salt in ("one", "two"):
            decoded = await pair.bring(tokens, 2, salt=salt)
            assert decoded.ids[0] == first.id
        await pair.idle()

    async def test_many_at_once_are_each_given_their_own(self, pair: Pair) -> None:
        prompts = [self.prompt(pair.block + 7 * which, which) for which in range(1, 7)]
        firsts = [(await pair.source.prefill(tokens)).first.id for tokens in prompts]
        decoded = await asyncio.gather(*(pair.bring(tokens, 3) for tokens in prompts))
        assert [one.ids[0] for one in decoded] == firsts
        await pair.idle()

    async def test_what_was_received_is_found(self, pair: Pair) -> None:
        pair.needs_local()
        tokens = self.prompt(3 * pair.block + 2)
        first = (await pair.source.prefill(tokens)).first
        async with (
            asyncio.timeout(PATIENCE),
            pair.offered(tokens) as offer,
            aclosing(pair.target.receiving(tokens, offer)) as events,
        ):
            received = await anext(events)
            assert received.cached == 0
            assert len(tokens) - pair.block < received.received <= len(tokens)
            decoded = await pair.target.decode((*tokens, first.id), 3)
            assert decoded.extended.cached >= len(tokens) // pair.block * pair.block
        await pair.idle()

    # Not taken, too late, twice

    async def test_an_offer_that_is_closed_unread_frees_all(self, pair: Pair) -> None:
        tokens = self.prompt(2 * pair.block)
        async with asyncio.timeout(PATIENCE), pair.offered(tokens):
            pass
        if self.frees_at_once:
            await pair.source.idle()
        assert (await pair.bring(tokens, 2)).ids[0] == (await pair.source.prefill(tokens)).first.id

    async def test_an_offer_whose_reader_says_nothing_ends_by_its_time(self, pair: Pair) -> None:
        """Whoever should have closed it may be gone as well."""
        offers = pair.source.offering(self.prompt(2 * pair.block, 6), timeout=2.0)
        async with asyncio.timeout(PATIENCE), aclosing(offers):
            await anext(offers)
            with pytest.raises(EngineError):
                await anext(offers)
        if self.frees_at_once:
            await pair.source.idle()

    async def test_a_late_reader_is_refused_or_right_but_never_wrong(self, pair: Pair) -> None:
        tokens = self.prompt(3 * pair.block, 7)
        first = (await pair.source.prefill(tokens)).first
        async with asyncio.timeout(PATIENCE), pair.offered(tokens) as offer:
            pass
        for which in range(8):  # what was kept may well be others' by now
            await pair.source.prefill(self.prompt(4 * pair.block, 20 + which))
        try:
            decoded = await pair.take(tokens, offer, 2)
        except PddError:
            decoded = await pair.bring(tokens, 2)
        assert decoded.ids[0] == first.id
        await pair.target.idle()

    async def test_an_offer_that_was_read_is_not_good_twice(self, pair: Pair) -> None:
        tokens = self.prompt(3 * pair.block, 8)
        first = (await pair.source.prefill(tokens)).first
        async with asyncio.timeout(PATIENCE), pair.offered(tokens) as offer:
            await pair.take(tokens, offer, 1)
        try:
            decoded = await pair.take(tokens, offer, 2, salt="another")
        except PddError:
            decoded = await pair.bring(tokens, 2, salt="another")
        assert decoded.ids[0] == first.id
        await pair.idle()

    async def test_what_is_no_offer_is_refused(self, pair: Pair) -> None:
        with pytest.raises(PddError):
            await pair.take(self.prompt(pair.block), Offer({}), 1)
        await pair.target.idle()

    async def test_an_engine_that_is_assisted_needs_an_offer(self, pair: Pair) -> None:
        if not pair.assisted:
            pytest.skip("it extends by itself")
        with pytest.raises(PddError):
            await pair.target.decode(self.prompt(pair.block), 1)
        await pair.target.idle()

    # Cancelled, in every state

    @pytest.mark.parametrize("way", ["close", "cancel"])
    async def test_a_cancelled_offer_ends(self, pair: Pair, way: str) -> None:
        tokens = self.prompt(2 * pair.block, 9)
        offers = pair.source.offering(tokens, request_id="gone")
        async with asyncio.timeout(PATIENCE), aclosing(offers):
            await anext(offers)
            if way == "cancel":
                for _ in range(2):
                    await pair.source.engine.cancel("gone")
                with pytest.raises(PddError):
                    await anext(offers)
        if self.frees_at_once:
            await pair.source.idle()

    @pytest.mark.parametrize("way", ["close", "cancel"])
    async def test_a_cancelled_reader_ends_and_frees_both(self, pair: Pair, way: str) -> None:
        tokens = self.prompt(3 * pair.block, 10)
        async with asyncio.timeout(PATIENCE), pair.offered(tokens) as offer:
            stream = pair.taking(tokens, offer, 400, request_id="gone")
            async with aclosing(stream):
                await anext(stream)
                if way == "cancel":
                    for _ in range(2):
                        await pair.target.engine.cancel("gone")
                    with pytest.raises(PddError):
                        async for _ in stream:
                            pass
        await pair.idle()

    async def test_cancels_at_random_moments_free_all(self, pair: Pair) -> None:
        dice = random.Random(3)

        async def one(which: int) -> None:
            tokens = self.prompt(2 * pair.block + which, which)
            bringing = asyncio.ensure_future(pair.bring(tokens, 4))
            await asyncio.wait({bringing}, timeout=dice.random() * 0.05)
            bringing.cancel()
            await asyncio.wait({bringing})

        for start in range(0, 12, 4):
            await asyncio.gather(*(one(which) for which in range(start, start + 4)))
        await pair.target.idle()
        if self.frees_at_once:
            await pair.source.idle()
        tokens = self.prompt(2 * pair.block, 40)
        assert (await pair.bring(tokens, 2)).ids[0] == (await pair.source.prefill(tokens)).first.id

    # Ends

    async def test_drain_waits_for_an_open_offer_and_makes_no_more(self, pair: Pair) -> None:
        tokens = self.prompt(2 * pair.block)
        async with asyncio.timeout(PATIENCE):
            async with pair.offered(tokens) as offer:
                drain = asyncio.create_task(pair.source.engine.drain())
                await asyncio.sleep(0.05)
                with pytest.raises(EngineError):
                    await anext(pair.source.offering(tokens))
                assert not drain.done()
                await pair.take(tokens, offer, 1)
            await drain

    async def test_close_ends_an_open_offer_and_may_come_twice(self, pair: Pair) -> None:
        offers = pair.source.offering(self.prompt(2 * pair.block))
        async with asyncio.timeout(PATIENCE), aclosing(offers):
            await anext(offers)
            await pair.source.engine.close()
            await pair.source.engine.close()
            with pytest.raises(EngineError):
                await anext(offers)


class Pair:
    """One that gives KV and one that reads it, as the session driver uses them."""

    def __init__(self, source: EngineHarness, target: EngineHarness) -> None:
        self.source, self.target = source, target
        self.block = source.info.layout.block_size
        self.assisted = target.info.capabilities.extend == "prefill_assisted"

    def needs_local(self) -> None:
        if self.assisted:
            pytest.skip("what it reads it reads with a decode")

    def offered(self, tokens: Sequence[int], salt: str = "") -> Offered:
        return Offered(self.source.offering(tokens, salt=salt))

    def taking(
        self, tokens: Sequence[int], offer: Offer, n: int, *, salt: str = "", request_id: str | None = None
    ) -> AsyncGenerator[object, None]:
        """What reads an offer: a decode, or a receive."""
        if self.assisted:
            return self.target.decoding(tokens, n, salt=salt, request_id=request_id, offer=offer)
        return self.target.receiving(tokens, offer, salt=salt, request_id=request_id)

    async def take(self, tokens: Sequence[int], offer: Offer, n: int, *, salt: str = "") -> Decoded:
        """Read an offer, and decode `n` tokens behind it."""
        async with asyncio.timeout(PATIENCE):
            if self.assisted:
                async with aclosing(self.target.decoding(tokens, n, salt=salt, offer=offer)) as events:
                    return await self.target.collect(events)
            async with aclosing(self.target.receiving(tokens, offer, salt=salt)) as received:
                assert isinstance(await anext(received), Received)
                return await self.target.decode(tokens, n, salt=salt)

    async def bring(self, tokens: Sequence[int], n: int, *, salt: str = "") -> Decoded:
        """The whole way: offer, read, decode; and the offer ends by itself."""
        async with asyncio.timeout(PATIENCE), self.offered(tokens, salt) as offer:
            return await self.take(tokens, offer, n, salt=salt)

    async def idle(self) -> None:
        await self.source.idle()
        await self.target.idle()


class Offered:
    """An offer, open for as long as the `async with`."""

    def __init__(self, offers: AsyncGenerator[Offer, None]) -> None:
        self._offers = offers

    async def __aenter__(self) -> Offer:
        return await anext(self._offers)

    async def __aexit__(self, *failure: object) -> None:
        await self._offers.aclose()
