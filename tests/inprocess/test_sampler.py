from __future__ import annotations

import numpy as np
import pytest

from pdd_runtime.inprocess.guides import Guides
from pdd_runtime.inprocess.sampler import Sampler
from pdd_runtime.inprocess.sampling import Logits
from pdd_runtime.plugins.engine import Guide, Sampling
from pdd_runtime.testing.byte_tokenizer import END, SIZE, byte_tokenizer

PROMPT = (1, 2, 2, 3)
OUTPUT = (3, 4, 4, 4)


def logits_of(seed: int = 0) -> Logits:
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32) * 3


def expected(logits: Logits, sampling: Sampling, prompt: tuple[int, ...], output: tuple[int, ...]) -> Logits:
    """The logits to choose by, written the long way: token after token."""
    adjusted = logits.copy()
    for token in range(SIZE):
        value = float(logits[token])
        if token in prompt + output:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= output.count(token) * sampling.frequency_penalty
        value -= (token in output) * sampling.presence_penalty
        adjusted[token] = value + sum(bias for id, bias in sampling.logit_bias if id == token)
    return adjusted


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=0.7),
        Sampling(presence_penalty=-1.5),
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=0.8, frequency_penalty=2.0, presence_penalty=1.0, logit_bias=((4, 3.0), (9, -2.0))),
        Sampling(logit_bias=((4, 3.0), (9, -100.0), (4, 1.0))),
    ],
    ids=str,
)
def test_logits_are_changed_as_the_definitions_say(sampling: Sampling) -> None:
    sampler = Sampler(sampling, PROMPT + OUTPUT, len(PROMPT))
    adjusted = sampler._adjust(logits_of())
    assert adjusted.dtype == np.float32
    np.testing.assert_allclose(adjusted, expected(logits_of(), sampling, PROMPT, OUTPUT), rtol=1e-5, atol=1e-5)


def test_counting_on_gives_the_bits_of_counting_again() -> None:
    sampling = Sampling(temperature=1.0, seed=3, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1)
    living, tokens = Sampler(sampling, PROMPT, len(PROMPT)), PROMPT
    for step in range(30):
        logits = logits_of(step % 5)
        again = Sampler(sampling, tokens, len(PROMPT))
        assert np.array_equal(again._adjust(logits), living._adjust(logits))
        token = living.sample(logits, len(tokens))
        assert again.sample(logits, len(tokens)) == token
        tokens += (token.id,)


def test_a_position_is_drawn_once() -> None:
    sampler = Sampler(Sampling(), PROMPT, len(PROMPT))
    sampler.sample(logits_of(), 4)
    with pytest.raises(AssertionError):
        sampler.sample(logits_of(), 4)


def test_what_needs_no_change_is_not_copied() -> None:
    logits = logits_of()
    assert Sampler(Sampling(stop_token_ids=(1,)), PROMPT, 4)._adjust(logits) is logits
    over = Sampler(Sampling(stop_token_ids=(1,), min_tokens=4), PROMPT + OUTPUT, 4)
    assert over._adjust(logits) is logits


def test_logits_of_others_are_left_alone() -> None:
    logits = logits_of()
    before = logits.copy()
    Sampler(Sampling(logit_bias=((1, 5.0),), min_tokens=3, stop_token_ids=(2,)), PROMPT, 4).sample(logits, 4)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "top", [{"top_p": 0.3}, {"top_k": 50}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 3}, {}], ids=str
)
def test_a_filter_never_keeps_what_the_guide_excludes(top: dict[str, float]) -> None:
    guides = Guides(byte_tokenizer(), SIZE)
    for seed in range(50):
        sampling = Sampling(temperature=2.0, seed=seed, guide=Guide(kind="regex", text="[ab]{20}"), **top)  # type: ignore[arg-type]
        sampler = Sampler(sampling, PROMPT, len(PROMPT))
        sampler.prepare(guides, samples=True)
        assert sampler.sample(logits_of(seed), 4).id in b"ab"


def test_a_complete_form_ends_before_min_tokens() -> None:
    guides = Guides(byte_tokenizer(), SIZE)
    sampling = Sampling(min_tokens=10, stop_token_ids=(END,), guide=Guide(kind="regex", text="ab?"))
    sampler = Sampler(sampling, PROMPT, len(PROMPT))
    sampler.prepare(guides, samples=True)
    made = [sampler.sample(logits_of(), 4 + n).id for n in range(3)]
    assert made == [*b"ab", END], "the end token was banned where something else fits, and not where nothing does"
