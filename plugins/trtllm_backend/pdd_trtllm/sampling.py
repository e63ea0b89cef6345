"""Requests in the words of trtllm-serve's `/v1/completions`, which refuses every field that it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdd_runtime.plugins.engine import Sampling

PATH = "/v1/completions"
MODEL = "pdd"
"""A server has one model, and does not compare names."""
BIAS = 100.0
"""The largest bias that it takes, either way: as OpenAI's API."""
_ANY = Sampling(temperature=0)


def completion(tokens: Sequence[int], max_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """A streamed completion of token ids by token ids. It ends at `stop_token_ids` alone, which come with it, whatever
    the model's own end is."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "stream": True,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
    }
    if sampling.temperature <= 0:
        # Releases differ in which of the two they take for greedy.
        body |= {"temperature": 0.0, "top_k": 1}
    else:
        body |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed & (2**63 - 1),
        }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): min(BIAS, max(-BIAS, bias)) for token, bias in sampling.logit_bias}
    return body


def context(tokens: Sequence[int]) -> dict[str, Any]:
    """A request that has the KV of `tokens` kept for a reader. Its own token is dropped; it is asked for two, as where
    but one is wanted nothing is kept."""
    params = {"disaggregated_params": {"request_type": "context_only"}}
    return completion(tokens, 2, _ANY) | {"stream": False} | params


def generation(tokens: Sequence[int], disaggregated: dict[str, Any]) -> dict[str, Any]:
    """A request that reads it. It ends with its first token, for what was read is found by others once it has ended."""
    params = {"disaggregated_params": disaggregated | {"request_type": "generation_only"}}
    return completion(tokens, 1, _ANY) | {"stream": False} | params
