"""The next token from one row of logits. Each row is worked on alone, so no batch can change its result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Sampling, Token
from pdd_runtime.plugins.sampling import uniform

Logits = NDArray[np.float32]
"""`[vocab]`"""

_LIKELIEST = (512, 8192)
"""So many tokens are sorted at first, then; where the answer is not among them, all are."""


def sample(logits: Logits, sampling: Sampling, position: int, adjusted: Logits | None = None) -> Token:
    """The token for `position`. It is chosen by the `adjusted` logits, where they are given; a token whose adjusted
    logit is -inf is never chosen. The logprobs are those of `logits` in any case. Raises `EngineError` where the
    largest is no number."""
    choice = logits if adjusted is None else adjusted
    chosen = int(choice.argmax())
    if not np.isfinite(choice[chosen]):
        raise EngineError("no token can be chosen", why=f"the largest logit is {choice[chosen]}")
    if sampling.temperature > 0:
        chosen = _draw(choice, sampling, position)
    if sampling.logprobs is None:
        return Token(position, chosen)
    ids = _ranked(logits, sampling.logprobs + 1)
    if len(ids) < sampling.logprobs:
        ids = _ranked(logits, len(logits))
    best = logits.max()
    log_total = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    top = tuple((id, float(logits[id]) - log_total) for id in ids[: sampling.logprobs].tolist())
    return Token(position, chosen, float(logits[chosen]) - log_total, top)


def _draw(logits: Logits, sampling: Sampling, position: int) -> int:
    """Inverse transform sampling, the likeliest token first: the position's one random number picks."""
    with np.errstate(over="ignore"):  # at a temperature near 0, where the weight is 0 either way
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    total, u = float(weights.sum(dtype=np.float64)), uniform(sampling.seed, position)
    possible = int(np.count_nonzero(logits > -np.inf))
    for count in (*_LIKELIEST, len(logits)):
        ids = _ranked(logits, max(count, sampling.top_k + 1))
        picked = _pick(weights[ids], total, len(ids) >= possible, sampling, u)
        if picked is not None:
            return int(ids[picked])
    raise AssertionError("no token is drawn from all")


def _ranked(logits: Logits, count: int) -> NDArray[np.intp]:
    """The ids of about `count` likeliest tokens, best first, equal ones by id: never one without all its equals."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    # Whatever the threshold, those above it are a head of the ranking. The maxima of some thousand columns give nearly
    # the same one as all logits do, in a fifth of the time.
    width = max(8 * count, 4096)
    rows = len(logits) // width
    values = logits[: rows * width].reshape(rows, width).max(axis=0) if rows > 1 else logits
    ids = np.flatnonzero(logits > np.partition(values, -count)[-count])
    return ids[np.argsort(-logits[ids], kind="stable")]


def _pick(weights: Logits, total: float, whole: bool, sampling: Sampling, u: float) -> int | None:
    """The index of the token drawn. `weights` (the first is 1, in falling order) belong to the likeliest tokens, to
    all if `whole`; `total` is the weight of all. Every filter keeps a head of the ranking. None: the head it keeps,
    or the token drawn, is not among these."""
    mass, kept = weights.cumsum(dtype=np.float64), len(weights)
    if 0 < sampling.top_k <= kept:
        kept, whole, total = sampling.top_k, True, float(mass[sampling.top_k - 1])
    if sampling.top_p < 1:
        kept = min(kept, int(np.count_nonzero(mass < sampling.top_p * total)) + 1)
    if sampling.min_p > 0:
        kept = min(kept, int(np.count_nonzero(weights >= sampling.min_p)))
    if whole or kept < len(weights):
        kept = max(kept, 1)
        return min(int(np.count_nonzero(mass[:kept] <= u * float(mass[kept - 1]))), kept - 1)
    drawn = int(np.count_nonzero(mass <= u * total))
    unfiltered = sampling.top_k == 0 and sampling.top_p >= 1 and sampling.min_p <= 0
    return drawn if unfiltered and drawn < len(weights) else None
