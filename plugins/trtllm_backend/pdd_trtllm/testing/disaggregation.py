"""What `disaggregated_params` say to the stand-in: refused where trtllm-serve refuses them, or would answer wrongly."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import xxhash

from pdd_trtllm.testing.arguments import LlmArgs
from pdd_trtllm.testing.protocol import DisaggregatedParams, Refusal

KINDS = ("context_only", "generation_only", "context_and_generation")


class State(msgspec.Struct, frozen=True):
    """The opaque state: where a context is kept, and of what it is the KV."""

    host: str
    port: int
    geometry: tuple[int, int, int, str, int]
    """Layers, KV heads, elements of a head, dtype, tokens in a page: two servers must agree on it."""
    digest: str
    """Of the prompt and of all else in the parameters."""


class Generation(NamedTuple):
    """A request whose prompt's KV comes from a context elsewhere."""

    request: int
    """Its number there."""
    first: int
    """The token that was chosen there."""
    state: State


Asked = Literal["context_only"] | Generation | None
"""None: an ordinary request."""


def examine(params: DisaggregatedParams | None, prompt: Sequence[int], args: LlmArgs, *, stream: bool) -> Asked:
    """Raises `Refusal`."""
    if params is None:
        return None
    kind = params.request_type.lower()
    if kind not in KINDS:
        raise Refusal(f"Unknown request type: {params.request_type}. Must be {', '.join(KINDS)}")
    if kind == "context_and_generation":
        return None
    transceiver = args.cache_transceiver_config
    if transceiver is None or transceiver.backend is None:
        raise Refusal(
            "kv_cache_transceiver is disabled, please set 'cache_transceiver_config: backend:<backend_type>` in "
            "config file for disaggregated serving"
        )
    if transceiver.max_tokens_in_buffer is not None and len(prompt) > transceiver.max_tokens_in_buffer:
        raise Refusal(f"max_tokens_in_buffer is {transceiver.max_tokens_in_buffer}, the prompt has {len(prompt)}")
    if kind == "generation_only":
        return _generation(params, prompt)
    if not args.disable_overlap_scheduler:
        raise Refusal("Context only requests are not supported in pytorch backend when overlap is enabled.")
    if stream:
        raise Refusal("a context only request cannot be streamed")
    return "context_only"


def answer(
    request: int, first: int, prompt: Sequence[int], place: tuple[str, int], geometry: tuple[int, int, int, str, int]
) -> DisaggregatedParams:
    """What a context answers with, for the generation: to be passed on whole, with another `request_type`."""
    params = DisaggregatedParams(request_type="context_only", first_gen_tokens=[first], ctx_request_id=request)
    state = State(*place, geometry, _digest(params, prompt))
    return params.model_copy(update={"encoded_opaque_state": base64.b64encode(msgspec.json.encode(state)).decode()})


def _generation(params: DisaggregatedParams, prompt: Sequence[int]) -> Generation:
    if params.ctx_request_id is None or params.encoded_opaque_state is None or not params.first_gen_tokens:
        raise Refusal("Invalid disaggregated params: ctx_request_id, first_gen_tokens and the opaque state are needed")
    try:
        state = msgspec.json.decode(base64.b64decode(params.encoded_opaque_state, validate=True), type=State)
    except (binascii.Error, msgspec.MsgspecError) as error:
        raise Refusal(f"the opaque state cannot be read: {error}") from error
    if state.digest != _digest(params, prompt):
        # The real one computes with what it is given, and answers wrongly.
        raise Refusal("the prompt, or one of disaggregated_params, is not what the context answered with")
    return Generation(params.ctx_request_id, params.first_gen_tokens[0], state)


def _digest(params: DisaggregatedParams, prompt: Sequence[int]) -> str:
    told = params.model_dump(exclude={"request_type", "encoded_opaque_state"})
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([told, list(prompt)]))
