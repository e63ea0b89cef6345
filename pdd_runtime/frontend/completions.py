"""/v1/completions: plain prompts in, what follows them out; one choice per prompt."""

from __future__ import annotations

from pdd_runtime.frontend.choice import Choice, Piece
from pdd_runtime.frontend.form import Form, encode
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.frontend.requests import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from pdd_runtime.pipeline import SessionRequest


class CompletionForm(Form):
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def _content(self, text: str) -> bytes:
        return b'"text":' + encode(text)

    def _empty(self) -> bytes:
        return b'"text":""'

    def _message(self, text: str) -> dict[str, object]:
        return {"text": text}

    def _logprobs(self, piece: Piece) -> object:
        name = self.language.token_name
        return {
            "tokens": [name(token.id) for token, _ in piece.entries],
            "token_logprobs": [token.logprob for token, _ in piece.entries],
            "top_logprobs": [{name(i): logprob for i, logprob in token.top} for token, _ in piece.entries],
            "text_offset": [offset for _, offset in piece.entries],
        }


async def completion_job(asked: CompletionRequest, model: ServedModel, request_id: str) -> Job:
    """Raises `RequestError` where the request does not fit the model."""
    model.check(asked.model, "logprobs" if asked.logprobs is not None else None)
    form = CompletionForm(
        request_id,
        model.name,
        model.language,
        logprobs=asked.logprobs is not None,
        token_ids=bool(asked.return_token_ids),
        usage=asked.include_usage,
    )
    sessions: list[SessionRequest] = []
    for index, prompt in enumerate(asked.prompt):
        tokens = await model.tokens(prompt)
        sessions.append(
            SessionRequest(
                # The first keeps the request's id, so that the header leads to a timeline.
                id=f"{request_id}-{index}" if index else request_id,
                tokens=tokens,
                max_tokens=model.room(len(tokens), asked.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt"),
                sampling=asked.sampling(model.language.eos_token_ids, asked.logprobs),
                salt=asked.cache_salt or "",
            )
        )
    choices = tuple(Choice(model.language, asked.stop or (), entries=form.wants_entries) for _ in sessions)
    return Job(form, tuple(sessions), choices, stream=bool(asked.stream))
