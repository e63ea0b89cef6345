"""The part of the engine suite on what is drawn: penalties, biases, `min_tokens` and guides, on every split of a run
between engines. Capabilities decide what is skipped."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.plugins.engine import Guide, Sampling
from pdd_runtime.testing.engine_fixtures import EngineFixtures
from pdd_runtime.testing.engine_harness import GREEDY, EngineHarness

OVERWHELMING = 1000.0
"""A bias or penalty that no logit of any engine outweighs."""
FORM = "[0-9]{3}(-[a-z]{2}){2}"
NEEDING = {
    "logprobs": Sampling(temperature=0, logprobs=1),
    "penalties": Sampling(temperature=0, presence_penalty=1.0),
    "logit_bias": Sampling(temperature=0, logit_bias=((5, 1.0),)),
    "min_tokens": Sampling(temperature=0, min_tokens=2),
    "guided": Sampling(temperature=0, guide=Guide(kind="regex", text=FORM)),
}
"""A request for each capability, that needs it."""
SPLIT = {
    "frequency": Sampling(temperature=0.8, seed=11, frequency_penalty=0.7),
    "presence": Sampling(temperature=0.8, seed=12, presence_penalty=1.5),
    "repetition": Sampling(temperature=0.8, seed=13, repetition_penalty=1.4),
    "all penalties, greedy": Sampling(
        temperature=0, frequency_penalty=0.5, presence_penalty=-0.3, repetition_penalty=1.2
    ),
    "logit bias": Sampling(temperature=0.8, top_p=0.95, seed=14, logit_bias=((70, 4.0), (80, -3.0), (90, 2.5))),
    "min_tokens": Sampling(temperature=1.5, seed=15, min_tokens=7, stop_token_ids=tuple(range(60, 120))),
    "everything": Sampling(
        temperature=1.1,
        top_k=40,
        min_p=0.001,
        seed=16,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        logit_bias=((65, 3.0),),
        min_tokens=5,
        stop_token_ids=tuple(range(100, 110)),
    ),
}


@pytest.mark.asyncio
class SamplingConformance(EngineFixtures):
    """A test of a capability is skipped where the engine does not declare it."""

    @pytest.mark.parametrize("need", NEEDING)
    async def test_what_the_engine_cannot_do_it_refuses(self, harness: EngineHarness, need: str) -> None:
        """To ignore it would be a wrong answer that nobody notices."""
        if need in harness.info.capabilities.names:
            pytest.skip(f"the engine has {need}")
        prompt, sampling = self.prompt(5), NEEDING[need]
        for attempt in (harness.prefill(prompt, sampling), harness.decode(prompt, 3, sampling)):
            with pytest.raises(RequestError):
                await attempt
        await harness.idle()

    @pytest.mark.parametrize("name", SPLIT)
    async def test_a_run_goes_on_the_same_behind_every_one_of_its_tokens(
        self, harness: EngineHarness, name: str
    ) -> None:
        sampling = SPLIT[name]
        self._need(harness, "exact", "position_keyed_sampling", *sampling.needs)
        prompt = self.prompt(harness.info.layout.block_size + 3)
        whole = (await harness.decode(prompt, 14, sampling, salt="whole")).ids
        assert (await harness.prefill(prompt, sampling, salt="split")).first.id == whole[0]
        for known in range(1, len(whole)):
            tokens = (*prompt, *whole[:known])
            rest = await harness.decode(tokens, 14 - known, sampling, prompt_tokens=len(prompt), salt="split")
            assert whole[:known] + rest.ids == whole, f"split behind token {known}"
        await harness.idle()

    async def test_frequency_and_presence_count_the_output_alone(self, harness: EngineHarness) -> None:
        self._need(harness, "exact", "penalties")
        prompt, first = await self._repeated(harness)
        for sampling in (
            Sampling(temperature=0, presence_penalty=OVERWHELMING),
            Sampling(temperature=0, frequency_penalty=OVERWHELMING),
        ):
            assert (await harness.prefill(prompt, sampling)).first.id == first, "the prompt was counted"
            assert (await harness.decode(prompt, 1, sampling)).ids == (first,), "the prompt was counted"
            again = await harness.decode(prompt, 1, sampling, prompt_tokens=1)
            assert again.ids != (first,), "known output was not counted"
            fresh = (await harness.decode(prompt, 20, sampling)).ids
            assert len(set(fresh)) == len(fresh), "a token came again"

    async def test_a_frequency_penalty_grows_with_every_time(self, harness: EngineHarness) -> None:
        self._need(harness, "exact", "penalties", "logit_bias")
        prompt, token = await self._repeated(harness)
        lead = ((token, OVERWHELMING),)
        often = Sampling(temperature=0, logit_bias=lead, frequency_penalty=OVERWHELMING / 2.5)
        once = Sampling(temperature=0, logit_bias=lead, presence_penalty=OVERWHELMING / 2.5)
        assert (await harness.decode(prompt, 4, often)).ids[:3] == (token,) * 3
        assert (await harness.decode(prompt, 8, often)).ids.count(token) < 8
        assert (await harness.decode(prompt, 8, once)).ids == (token,) * 8

    async def test_a_repetition_penalty_counts_the_prompt_too(self, harness: EngineHarness) -> None:
        self._need(harness, "exact", "penalties")
        prompt, first = await self._repeated(harness)
        sampling = Sampling(temperature=0, repetition_penalty=OVERWHELMING)
        assert (await harness.prefill(prompt, sampling)).first.id != first
        assert (await harness.decode(prompt, 1, sampling)).ids != (first,)

    async def test_a_bias_makes_a_token_certain_or_impossible(self, harness: EngineHarness) -> None:
        self._need(harness, "logit_bias")
        prompt = self.prompt(12)
        free = await harness.generate(prompt, 8)
        wanted = Sampling(temperature=1, seed=3, logit_bias=((free[3], OVERWHELMING),))
        assert await harness.generate(prompt, 6, wanted) == (free[3],) * 6
        assert (await harness.prefill(prompt, wanted)).first.id == free[3]
        unwanted = Sampling(temperature=1, seed=3, logit_bias=tuple((token, -OVERWHELMING) for token in set(free)))
        assert not set(free) & set(await harness.generate(prompt, 8, unwanted))

    async def test_logprobs_stay_those_of_the_model(self, harness: EngineHarness) -> None:
        self._need(harness, "exact", "logprobs", "logit_bias", "penalties")
        prompt = self.prompt(12)
        free = (await harness.prefill(prompt, Sampling(temperature=0, logprobs=4))).first
        unlikely = free.top[3][0]
        sampling = Sampling(
            temperature=0.5,
            logprobs=4,
            logit_bias=((unlikely, OVERWHELMING),),
            frequency_penalty=1.0,
            repetition_penalty=2.0,
        )
        token = (await harness.prefill(prompt, sampling)).first
        assert token.id == unlikely
        assert token.top == free.top
        assert token.logprob == free.top[3][1]

    async def test_no_stop_token_comes_before_min_tokens(self, harness: EngineHarness) -> None:
        self._need(harness, "min_tokens", "logit_bias")
        prompt = self.prompt(12)
        stop = (await harness.generate(prompt, 1))[0]
        sampling = Sampling(
            temperature=0, min_tokens=4, stop_token_ids=(stop, 10**6), logit_bias=((stop, OVERWHELMING),)
        )
        assert (await harness.prefill(prompt, sampling)).first.id != stop
        decoded = await harness.decode(prompt, 10, sampling)
        assert decoded.stopped.reason == "stop"
        assert [token == stop for token in decoded.ids] == [False] * 4 + [True]
        for known in range(1, 5):
            tokens = (*prompt, *decoded.ids[:known])
            rest = await harness.decode(tokens, 10, sampling, prompt_tokens=len(prompt))
            assert len(rest.ids) == 5 - known, "min_tokens was counted from the handoff"

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    async def test_guided_output_has_its_form_behind_every_split(
        self, harness: EngineHarness, temperature: float
    ) -> None:
        self._need(harness, "guided")
        files = await harness.engine.tokenizer()
        tokenizer, ends = Tokenizer.from_str(files.tokenizer_json), files.eos_token_ids
        guide = Guide(kind="regex", text=FORM)
        sampling = Sampling(temperature=temperature, seed=5, stop_token_ids=ends, guide=guide)
        prompt = self.prompt(12)
        whole = await harness.decode(prompt, 30, sampling)
        assert whole.stopped.reason == "stop"
        for known in range(len(whole.ids)):
            tokens = (*prompt, *whole.ids[:known])
            rest = await harness.decode(tokens, 30, sampling, prompt_tokens=len(prompt))
            ids = whole.ids[:known] + rest.ids
            assert rest.stopped.reason == "stop"
            assert ids[-1] in ends
            assert re.fullmatch(FORM, tokenizer.decode(ids[:-1])), f"split behind token {known}"
            if harness.info.capabilities.exact:
                assert ids == whole.ids
        first = (await harness.prefill(prompt, sampling)).first.id
        assert re.match("[0-9]", tokenizer.decode([first]))
        assert len(await harness.generate(prompt, 3, sampling)) == 3, "max_tokens may cut it"
        await harness.idle()

    async def test_a_guide_that_is_none_is_refused_and_leaves_nothing(self, harness: EngineHarness) -> None:
        self._need(harness, "guided")
        for guide in (
            Guide(kind="json_schema", text='{"type": "no such type"}'),
            Guide(kind="json_schema", text="{"),
            Guide(kind="regex", text="("),
            Guide(kind="choice", text="[]"),
            Guide(kind="grammar", text="no grammar"),
        ):
            sampling = Sampling(temperature=0, guide=guide)
            for attempt in (harness.prefill(self.prompt(40), sampling), harness.decode(self.prompt(40), 3, sampling)):
                with pytest.raises(RequestError) as caught:
                    await attempt
                assert caught.value.where
        assert await harness.engine.cached(self.prompt(40)) == 0, "it was computed"
        await harness.idle()

    async def test_known_output_that_is_not_of_the_form_is_an_error(self, harness: EngineHarness) -> None:
        self._need(harness, "guided")
        tokenizer = Tokenizer.from_str((await harness.engine.tokenizer()).tokenizer_json)
        prompt, wrong = self.prompt(12), tokenizer.encode("wrong").ids
        sampling = Sampling(temperature=0, guide=Guide(kind="regex", text=FORM))
        with pytest.raises(EngineError):
            await harness.decode((*prompt, *wrong), 3, sampling, prompt_tokens=len(prompt))
        await harness.idle()

    async def _repeated(self, harness: EngineHarness) -> tuple[tuple[int, ...], int]:
        """A prompt whose likeliest next token is in it, and that token."""
        for which in range(40):
            prompt = self.prompt(200, which)
            first = (await harness.prefill(prompt, GREEDY)).first.id
            if first in prompt[1:]:
                return prompt, first
        raise AssertionError("no prompt's next token is in it: give the suite another `vocabulary`")

    @staticmethod
    def _need(harness: EngineHarness, *needs: str) -> None:
        missing = [need for need in needs if need not in harness.info.capabilities.names]
        if missing:
            pytest.skip(f"the engine does not have: {', '.join(missing)}")
