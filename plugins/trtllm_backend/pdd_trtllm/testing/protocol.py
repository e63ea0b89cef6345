"""What `/v1/completions` of trtllm-serve takes: every field it has, and no other."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class DisaggregatedParams(Strict):
    request_type: str
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None


class CompletionRequest(Strict):
    model: str
    prompt: list[int] | list[list[int]] | str | list[str]
    best_of: int | None = None
    echo: bool | None = False
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    presence_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    lora_request: dict[str, Any] | None = None
    prompt_ignore_length: int | None = 0
    use_beam_search: bool = False
    top_k: int = 0
    top_p_min: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    return_context_logits: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    response_format: dict[str, Any] | None = None
    disaggregated_params: DisaggregatedParams | None = None

    @model_validator(mode="before")
    @classmethod
    def _pairs(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("stream_options") and not data.get("stream"):
                raise ValueError("Stream options can only be defined when stream is true.")
            if data.get("suffix"):
                raise ValueError("suffix is not supported")
        return data


class Refusal(Exception):
    """Answered as an error of the request."""


BIASES = (-100.0, 100.0)
"""What a bias may be."""


def check_biases(biases: dict[str, float] | None, vocab: int) -> tuple[tuple[int, float], ...]:
    """As pairs of numbers. Raises `Refusal`."""
    pairs = []
    for text, bias in (biases or {}).items():
        if not text.lstrip("-").isdigit():
            raise Refusal(f"Invalid logit_bias key '{text}': must be a valid integer token ID")
        if not 0 <= int(text) < vocab:
            raise Refusal(f"Token ID {text} out of vocabulary range [0, {vocab})")
        if not BIASES[0] <= bias <= BIASES[1]:
            raise Refusal(f"logit_bias value for token ID {text} must be in [-100, 100]")
        pairs.append((int(text), bias))
    return tuple(pairs)
