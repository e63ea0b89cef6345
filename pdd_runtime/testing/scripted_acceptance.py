"""What the scripted engine does not take."""

from __future__ import annotations

from pdd_runtime.errors import CapacityError, RequestError
from pdd_runtime.plugins.engine import Capabilities, DecodeRequest, OfferRequest, PrefillRequest, ReceiveRequest
from pdd_runtime.testing.scripted_config import ScriptedConfig

Asked = PrefillRequest | DecodeRequest | OfferRequest | ReceiveRequest


def check(request: Asked, config: ScriptedConfig, capabilities: Capabilities) -> None:
    """Raises `RequestError` for what it cannot do and for ids that are no tokens, `CapacityError` for too many."""
    tokens, where = request.tokens, f"request {request.id}"
    if lacking := set(request.sampling.needs) - capabilities.names:
        raise RequestError(f"the engine cannot do this: {', '.join(sorted(lacking))}", where=where)
    if len(tokens) > config.context_length:
        raise CapacityError(
            f"{len(tokens)} tokens are more than the context length of {config.context_length}",
            where=where,
            fix="shorten the prompt",
        )
    if not tokens or not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        raise RequestError(f"tokens must be ids from 0 to {config.vocab_size - 1}, at least one", where="tokens")
