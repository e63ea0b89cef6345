from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess import sampling as module
from pdd_runtime.inprocess.sampling import Logits, sample
from pdd_runtime.plugins.engine import Sampling

DRAWS = 4000


def logits_of(vocab: int, spread: float = 2.0, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).standard_normal(vocab, np.float32) * np.float32(spread)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits - np.log(np.exp(logits).sum())


def expected(logits: Logits, sampling: Sampling) -> NDArray[np.float64]:
    """The distribution the filters leave, written the long way: over the whole vocabulary, filter after filter."""
    p = np.exp(log_softmax(logits.astype(np.float64) / sampling.temperature))
    order = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        head, mass, whole = [], 0.0, float(p[order].sum())
        for i in order:
            head.append(i)
            mass += float(p[i])
            if mass >= sampling.top_p * whole:
                break
        order = head
    order = [i for i in order if p[i] >= sampling.min_p * p.max()]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.3, seed=2),
        Sampling(temperature=3.0, seed=3),
        Sampling(temperature=1.0, top_k=5, seed=4),
        Sampling(temperature=1.0, top_p=0.7, seed=5),
        Sampling(temperature=1.0, min_p=0.1, seed=6),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05, seed=7),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = logits_of(60)
    p = expected(logits, sampling)
    counts = Counter(sample(logits, sampling, position).id for position in range(DRAWS))
    assert all(p[token] > 0 for token in counts), "a token was drawn that the filters exclude"
    for token, chance in enumerate(p.tolist()):
        spread = math.sqrt(DRAWS * chance * (1 - chance))
        assert abs(counts[token] - DRAWS * chance) <= 5 * spread + 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=5.0),
        Sampling(temperature=1.0, top_p=0.95),
        Sampling(temperature=5.0, top_p=0.999),
        Sampling(temperature=1.0, min_p=0.001),
        Sampling(temperature=1.0, top_k=40),
        Sampling(temperature=2.0, top_k=3000, top_p=0.9),
        Sampling(temperature=2.0, top_k=10**6),
    ],
    ids=str,
)
def test_the_short_way_draws_what_sorting_everything_draws(monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    rows = [(logits_of(20_000, seed=seed) * 8).round() / 8 for seed in range(40)]  # many equal logits
    short = [sample(row, sampling, 9).id for row in rows]
    monkeypatch.setattr(module, "_LIKELIEST", ())
    assert [sample(row, sampling, 9).id for row in rows] == short


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.array([0, 3, 1, 3], np.float32)
    token = sample(logits, Sampling(temperature=0, logprobs=3), 4)
    assert (token.position, token.id) == (4, 1)
    assert [id for id, _ in token.top] == [1, 3, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_an_error(temperature: float, broken: float) -> None:
    logits = np.full(50, broken, np.float32) if broken < 0 else logits_of(50)
    logits[7] = broken
    with pytest.raises(EngineError, match="no token can be chosen"):
        sample(logits, Sampling(temperature=temperature), 3)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = logits_of(3000)
    token = sample(logits, Sampling(temperature=0.2, top_k=3, seed=1, logprobs=5), 0)
    exact = log_softmax(logits.astype(np.float64))
    assert token.logprob == pytest.approx(float(exact[token.id]), abs=1e-4)
    best = np.argsort(-exact)[:5]
    assert [id for id, _ in token.top] == best.tolist()
    assert [value for _, value in token.top] == pytest.approx(exact[best].tolist(), abs=1e-4)
    assert sample(logits, Sampling(temperature=0, logprobs=0), 0).top == ()
    assert len(sample(np.zeros(50, np.float32), Sampling(temperature=0, logprobs=5), 0).top) == 5


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    rows = np.stack([logits_of(1000, seed=seed) for seed in range(16)])
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3, logprobs=2)
    assert sample(rows[7], sampling, 5) == sample(rows[7].copy(), sampling, 5)
