"""The next token from one row of logits. Each row is worked on alone, so no batch can change its result."""

from __future__ import annotations

import torch
from torch import Tensor

from pdd_runtime.plugins.engine import Sampling, Token
from pdd_runtime.plugins.sampling import uniform

_LIKELIEST = 512
"""So many tokens are sorted at first; where the answer is not among them, all are."""


def sample(logits: Tensor, sampling: Sampling, position: int, adjusted: Tensor | None = None) -> Token:
    """The token for `position`; `logits` is `[vocab]`, float32. It is chosen by the `adjusted` ones, where they are
    given; a token whose adjusted logit is -inf is never chosen. The logprobs are those of `logits` in any case."""
    choice = logits if adjusted is None else adjusted
    chosen = int(choice.argmax()) if sampling.temperature <= 0 else _draw(choice, sampling, position)
    if sampling.logprobs is None:
        return Token(position, chosen)
    logprobs = torch.log_softmax(logits, dim=0)
    ids = _ranked(logits, sampling.logprobs + 1)
    if len(ids) < sampling.logprobs:
        ids = _ranked(logits, len(logits))
    top = tuple((id, float(logprobs[id])) for id in ids[: sampling.logprobs].tolist())
    return Token(position, chosen, float(logprobs[chosen]), top)


def _draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Inverse transform sampling, the likeliest token first: the position's one random number picks."""
    weights = ((logits - logits.max()) / sampling.temperature).exp()
    total, u = float(weights.sum(dtype=torch.float64)), uniform(sampling.seed, position)
    ids = _ranked(logits, max(_LIKELIEST, sampling.top_k + 1))
    whole = len(ids) == len(logits) or len(ids) == int((logits > -torch.inf).sum())
    picked = _pick(weights[ids], total, whole, sampling, u)
    if picked is None:
        ids = _ranked(logits, len(logits))
        picked = _pick(weights[ids], total, True, sampling, u)
        assert picked is not None
    return int(ids[picked])


def _ranked(logits: Tensor, count: int) -> Tensor:
    """The ids of about `count` likeliest tokens, best first, equal ones by id: never one without all its equals."""
    if count >= len(logits):
        return logits.sort(descending=True, stable=True).indices
    values, ids = logits.topk(count)
    ids = ids[values > values[-1]].sort().values
    return ids[logits[ids].sort(descending=True, stable=True).indices]


def _pick(weights: Tensor, total: float, whole: bool, sampling: Sampling, u: float) -> int | None:
    """The index of the token drawn. `weights` (the first is 1, in falling order) belong to the likeliest tokens, to
    all if `whole`; `total` is the weight of all. Every filter keeps a head of the ranking. None: the head it keeps,
    or the token drawn, is not among these."""
    mass, kept = weights.cumsum(0, dtype=torch.float64), len(weights)
    if 0 < sampling.top_k < kept:
        kept, whole, total = sampling.top_k, True, float(mass[sampling.top_k - 1])
    if sampling.top_p < 1:
        kept = min(kept, int((mass < sampling.top_p * total).sum()) + 1)
    if sampling.min_p > 0:
        kept = min(kept, int((weights >= sampling.min_p).sum()))
    if whole or kept < len(weights):
        kept = max(kept, 1)
        return min(int((mass[:kept] <= u * float(mass[kept - 1])).sum()), kept - 1)
    drawn = int((mass <= u * total).sum())
    unfiltered = sampling.top_k == 0 and sampling.top_p >= 1 and sampling.min_p <= 0
    return drawn if unfiltered and drawn < len(weights) else None
