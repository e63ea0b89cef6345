"""vLLM's /v1/completions, in token IDs both ways: requests as it takes them, and what it streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Sampling, Token

PATH = "/v1/completions"
_SEEDS = 2**63
"""vLLM takes seeds of 63 bits and a sign."""
_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that seeds of neighbouring positions differ; 2^64 by the golden ratio, as in Weyl sequences."""
_ID = "token_id:"


def request(tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str, vocab: int) -> dict[str, Any]:
    """The body for one stream of at most `max_tokens` tokens behind `tokens`; all token ids are below `vocab`."""
    body: dict[str, Any] = {
        "prompt": list(tokens),
        "add_special_tokens": False,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        # What ends an answer is in stop_token_ids, and nothing else does.
        "ignore_eos": True,
        "stop_token_ids": [token for token in sampling.stop_token_ids if token < vocab],
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        # vLLM's random numbers begin anew with each request: with one seed, the token behind a handoff would be drawn
        # by the very number that the first one was.
        "seed": (sampling.seed + len(tokens) * _STRIDE) % _SEEDS,
    }
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if salt:
        body["cache_salt"] = salt
    return body


def tokens_of(choice: Mapping[str, Any], position: int, logprobs: int | None) -> tuple[Token, ...]:
    """What one event brings; the first of them is at `position`. Raises `EngineError` for an event of another form, and
    where the server gave the request up."""
    try:
        if choice.get("finish_reason") in ("abort", "error"):
            raise EngineError("vLLM ended the request", why=f"finish_reason: {choice['finish_reason']}")
        ids = choice["token_ids"] or []
        if logprobs is None:
            return tuple(Token(position + index, id) for index, id in enumerate(ids))
        found = choice["logprobs"]
        return tuple(
            Token(position + index, id, logprob, _best(top, logprobs))
            for index, (id, logprob, top) in enumerate(
                zip(ids, found["token_logprobs"], found["top_logprobs"], strict=True)
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            "vLLM streams what it did not in the versions that were tried",
            why=f"{type(error).__name__}: {error}",
            fix="use a version that the plugin's README names",
        ) from error


def cached_of(usage: Mapping[str, Any]) -> int:
    """Tokens of the prompt that were not computed. Raises `EngineError` where the server does not say so."""
    try:
        return int(usage["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            "vLLM does not say how much of a prompt it had",
            why=f"{type(error).__name__}: {error}",
            fix="start it with --enable-prompt-tokens-details",
        ) from error


def _best(top: Mapping[str, float] | None, n: int) -> tuple[tuple[int, float], ...]:
    """The `n` likeliest. vLLM adds the chosen token where it is none of them."""
    found = [(int(name.removeprefix(_ID)), value) for name, value in (top or {}).items()]
    return tuple(sorted(found, key=lambda pair: -pair[1])[:n])
