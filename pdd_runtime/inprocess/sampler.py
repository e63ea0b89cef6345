"""How one request chooses its tokens: its sampling settings, and what they remember of the tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.inprocess.sampling import Logits, sample
from pdd_runtime.plugins.engine import Sampling, Token

if TYPE_CHECKING:
    # llguidance need not be installed.
    from pdd_runtime.inprocess.guides import Guides, GuideState


class Sampler:
    """All it remembers follows from the tokens it begins with and those it has chosen, so a request goes on in another
    engine as if it had never moved. Only the thread of the forward passes calls `sample`."""

    def __init__(self, sampling: Sampling, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`tokens`: all that are known, the first `prompt_tokens` of them the prompt."""
        self.sampling = sampling
        self._guide: GuideState | None = None
        self._known, self._prompt_tokens, self._position = tokens, prompt_tokens, len(tokens)
        self._penalises = "penalties" in sampling.needs
        self._counts: Logits | None = None
        self._seen: NDArray[np.bool_] | None = None

    def prepare(self, guides: Guides, *, samples: bool) -> None:
        """Compile the guide and follow the known output, before the first token is chosen; in the guides' thread.
        Where none will be (not `samples`) it is only compiled: so main has it when its turn comes. Raises
        `RequestError` and `EngineError` as `Guides.follow` does."""
        if self.sampling.guide is not None:
            output = self._known[self._prompt_tokens :] if samples else ()
            self._guide = guides.follow(self.sampling.guide, output, self.sampling.stop_token_ids)

    def sample(self, logits: Logits, position: int) -> Token:
        """The token for `position`, each position once and in order."""
        assert position == self._position, f"position {position} instead of {self._position}"
        token = sample(logits, self.sampling, position, self._adjust(logits))
        self._position += 1
        if self._counts is not None and self._seen is not None:
            self._counts[token.id] += 1
            self._seen[token.id] = True
        if self._guide is not None:
            self._guide.accept(token.id)
        return token

    def _adjust(self, logits: Logits) -> Logits:
        """The logits to choose by: the model's own, or a copy with all that the request asks for."""
        sampling, made = self.sampling, self._position - self._prompt_tokens
        stops = sampling.stop_token_ids if made < sampling.min_tokens else ()
        banned = [token for token in stops if 0 <= token < len(logits)]
        if not (self._penalises or sampling.logit_bias or banned or self._guide):
            return logits
        adjusted = self._penalise(logits) if self._penalises else logits.copy()
        if sampling.logit_bias:
            tokens, bias = zip(*sampling.logit_bias, strict=True)
            np.add.at(adjusted, list(tokens), np.array(bias, np.float32))
        if self._guide is not None:
            bits = np.frombuffer(self._guide.mask(), np.uint8)
            adjusted[np.unpackbits(bits, count=len(logits), bitorder="little") == 0] = -np.inf
        if banned:
            fitting = adjusted.copy()
            adjusted[banned] = -np.inf
            if adjusted.max() == -np.inf:
                return fitting  # the form is complete and cannot be longer, however many tokens were wanted
        return adjusted

    def _penalise(self, logits: Logits) -> Logits:
        if self._counts is None or self._seen is None:
            known = np.array(self._known, np.int64)
            self._counts = np.bincount(known[self._prompt_tokens :], minlength=len(logits)).astype(np.float32)
            self._seen = np.bincount(known, minlength=len(logits)) > 0
        sampling, counts = self.sampling, self._counts
        if (penalty := sampling.repetition_penalty) != 1:
            logits = np.where(self._seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
        frequency, presence = np.float32(sampling.frequency_penalty), np.float32(sampling.presence_penalty)
        return logits - counts * frequency - np.minimum(counts, 1) * presence
