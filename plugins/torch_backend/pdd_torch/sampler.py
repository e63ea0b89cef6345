"""How one request chooses its tokens: its sampling settings, and what they remember of the tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdd_runtime.plugins.engine import Sampling, Token
from pdd_torch.guides import Guides, GuideState
from pdd_torch.sampling import sample

_NEVER = float("-inf")


class Sampler:
    """All it remembers follows from the tokens it begins with and those it has chosen, so a request goes on in another
    engine as if it had never moved. Only the thread of the forward passes calls `sample`."""

    def __init__(self, sampling: Sampling, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`tokens`: all that are known, the first `prompt_tokens` of them the prompt."""
        self.sampling = sampling
        self._guide: GuideState | None = None
        self._known, self._prompt_tokens, self._position = tokens, prompt_tokens, len(tokens)
        self._penalises = "penalties" in sampling.needs
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None

    def prepare(self, guides: Guides, *, samples: bool) -> None:
        """Compile the guide and follow the known output, before the first token is chosen; in the guides' thread.
        Where none will be (not `samples`) it is only compiled: so main has it when its turn comes. Raises
        `RequestError` and `EngineError` as `Guides.follow` does."""
        if self.sampling.guide is not None:
            output = self._known[self._prompt_tokens :] if samples else ()
            self._guide = guides.follow(self.sampling.guide, output, self.sampling.stop_token_ids)

    def sample(self, logits: Tensor, position: int) -> Token:
        """The token for `position`, each position once and in order; `logits` is `[vocab]`, float32."""
        assert position == self._position, f"position {position} instead of {self._position}"
        token = sample(logits, self.sampling, position, self._adjust(logits))
        self._position += 1
        if self._counts is not None and self._seen is not None:
            self._counts[token.id] += 1
            self._seen[token.id] = True
        if self._guide is not None:
            self._guide.accept(token.id)
        return token

    def _adjust(self, logits: Tensor) -> Tensor:
        """The logits to choose by: the model's own, or a copy with all that the request asks for."""
        sampling, made = self.sampling, self._position - self._prompt_tokens
        stops = sampling.stop_token_ids if made < sampling.min_tokens else ()
        banned = [token for token in stops if 0 <= token < len(logits)]
        if not (self._penalises or sampling.logit_bias or banned or self._guide):
            return logits
        adjusted = self._penalise(logits) if self._penalises else logits.clone()
        if sampling.logit_bias:
            tokens, bias = zip(*sampling.logit_bias, strict=True)
            adjusted.index_add_(0, torch.tensor(tokens), torch.tensor(bias, dtype=logits.dtype))
        if self._guide is not None:
            bits = np.frombuffer(self._guide.mask(), np.uint8)
            fits = np.unpackbits(bits, count=len(logits), bitorder="little").astype(bool)
            adjusted.masked_fill_(torch.from_numpy(~fits), _NEVER)
        if banned:
            fitting = adjusted.clone()
            adjusted[banned] = _NEVER
            if bool((adjusted == _NEVER).all()):
                return fitting  # the form is complete and cannot be longer, however many tokens were wanted
        return adjusted

    def _penalise(self, logits: Tensor) -> Tensor:
        if self._counts is None or self._seen is None:
            known = torch.tensor(self._known, dtype=torch.int64)
            self._counts = torch.bincount(known[self._prompt_tokens :], minlength=len(logits)).to(logits.dtype)
            self._seen = torch.bincount(known, minlength=len(logits)) > 0
        sampling, counts = self.sampling, self._counts
        if (penalty := sampling.repetition_penalty) != 1:
            logits = torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        return logits - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
