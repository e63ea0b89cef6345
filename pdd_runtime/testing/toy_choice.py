"""How one request of the scripted engine chooses its tokens, penalties and all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pdd_runtime.plugins.engine import Sampling, Token
from pdd_runtime.plugins.sampling import uniform
from pdd_runtime.testing.toy_model import HALF, ToyModel


class ToyChoice:
    """Chooses by the toy model's distribution, or by what penalties, biases and `min_tokens` make of it. All that it
    remembers follows from the tokens it begins with and those it has chosen."""

    def __init__(self, model: ToyModel, sampling: Sampling, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`tokens`: all that are known, the first `prompt_tokens` of them the prompt."""
        self._model, self._sampling, self._prompt_tokens = model, sampling, prompt_tokens
        self._plain = not {"penalties", "logit_bias", "min_tokens"}.intersection(sampling.needs)
        if not self._plain:
            self._seen = set(tokens)
            self._counts = Counter(tokens[prompt_tokens:])
            self._biases = dict(sampling.logit_bias)

    def next(self, state: int, position: int) -> Token:
        """The token at `position`, after `state`."""
        if self._plain:
            return self._model.next(state, position, self._sampling)
        token = self._adjusted(state, position)
        self._seen.add(token.id)
        self._counts[token.id] += 1
        return token

    def _adjusted(self, state: int, position: int) -> Token:
        model, sampling = self._model, self._sampling
        made = position - self._prompt_tokens
        banned = frozenset(sampling.stop_token_ids if made < sampling.min_tokens else ())
        if model.ends(position) and model.eos not in banned:
            return model.next(state, position, sampling)
        ranked = model.ranked(state)
        rank = self._draw([self._logit(k, token, banned) for k, token in enumerate(ranked)], position)
        logprob, top = model.logprobs(rank, ranked, sampling)
        return Token(position, ranked[rank], logprob, top)

    def _logit(self, rank: int, token: int, banned: frozenset[int]) -> float:
        if token in banned:
            return -np.inf
        sampling, logit = self._sampling, (rank + 1) * HALF
        if token in self._seen:
            # The toy's logits are log probabilities, all negative.
            logit *= sampling.repetition_penalty
        if (count := self._counts[token]) > 0:
            logit -= count * sampling.frequency_penalty + sampling.presence_penalty
        return logit + self._biases.get(token, 0.0)

    def _draw(self, values: list[float], position: int) -> int:
        """The index of the one that is drawn, the likeliest first, as temperature and filters say."""
        sampling, logits = self._sampling, np.array(values)
        order = np.argsort(-logits, kind="stable")
        if sampling.temperature <= 0:
            return int(order[0])
        weights = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)
        mass = weights.cumsum()
        kept = int(np.count_nonzero(weights >= max(sampling.min_p, 1e-300)))
        if sampling.top_k:
            kept = min(kept, sampling.top_k)
        if sampling.top_p < 1:
            kept = min(kept, 1 + int(np.count_nonzero(mass < sampling.top_p * mass[kept - 1])))
        drawn = np.count_nonzero(mass[:kept] <= uniform(sampling.seed, position) * mass[kept - 1])
        return int(order[min(int(drawn), kept - 1)])
