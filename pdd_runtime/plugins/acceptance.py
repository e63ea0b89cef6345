"""What no engine can do, whatever it computes with: said before a request takes anything."""

from __future__ import annotations

from pdd_runtime.errors import CapacityError, RequestError
from pdd_runtime.plugins.engine import DecodeRequest, PrefillRequest


def check_request(
    request: PrefillRequest | DecodeRequest, *, vocab: int, context: int, needed: int, blocks: int
) -> None:
    """`needed`: blocks of KV without which it cannot be served; `blocks`: those there are in all. Raises `RequestError`
    for ids that are no tokens, `CapacityError` where it is too long."""
    where, tokens = f"request {request.id}", request.tokens
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab:
        raise RequestError(f"tokens must be ids below {vocab}, at least one", where=where)
    if len(tokens) > context:
        raise CapacityError(
            f"{len(tokens)} tokens are more than the context of {context}", where=where, fix="send fewer tokens"
        )
    if not all(0 <= token < vocab for token, _ in request.sampling.logit_bias):
        raise RequestError(f"token ids must be below {vocab}", where="logit_bias")
    if needed > blocks:
        raise CapacityError(
            f"the request needs {needed} blocks of KV, the pool has {blocks}",
            where=where,
            fix="ask for fewer tokens, or raise the engine's kv_memory",
        )
