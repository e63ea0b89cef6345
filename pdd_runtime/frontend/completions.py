"""/v1/completions: plain prompts in, what follows them out; one choice per prompt."""

from __future__ import annotations

from pdd_runtime.frontend.choice import Choice, Entry, Piece
from pdd_runtime.frontend.fields import Prompt
from pdd_runtime.frontend.form import Form, encode
from pdd_runtime.frontend.job import Job, choice_of, sessions_of
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.frontend.requests import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from pdd_runtime.pipeline import SessionRequest
from pdd_runtime.plugins.engine import Token


class CompletionForm(Form):
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def _content(self, text: str) -> bytes:
        return b'"text":' + encode(text)

    def _empty(self) -> bytes:
        return b'"text":""'

    def _message(self, index: int, piece: Piece) -> dict[str, object]:
        return {"text": piece.text}

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
    model.check_name(asked.model)
    form = CompletionForm(
        request_id,
        model.name,
        model.language,
        logprobs=asked.logprobs is not None,
        token_ids=bool(asked.return_token_ids),
        usage=asked.include_usage,
    )
    eos = model.language.eos_token_ids
    sampling = asked.sampling(eos, asked.logprobs)
    model.check_sampling(asked, sampling)
    sessions: list[SessionRequest] = []
    choices: list[Choice] = []
    for prompt in asked.prompt:
        tokens = await model.tokens(prompt)
        room = model.room(len(tokens), asked.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt")
        sessions += sessions_of(asked, request_id, len(sessions), tokens, room, asked.sampling(eos, asked.logprobs))
        echo = echo_of(model.language, prompt, tokens, entries=form.wants_entries) if asked.echo else None
        choices += [choice_of(asked, model.language, form, echo=echo) for _ in range(asked.choices)]
    return Job(
        form,
        tuple(sessions),
        tuple(choices),
        bool(asked.stream),
        of_prompt=asked.choices,
        fields=asked.fields(sampling),
    )


def echo_of(language: Language, prompt: Prompt, tokens: tuple[int, ...], *, entries: bool) -> Piece:
    """The prompt as the beginning of its own answer. Its tokens have no logprobs: nobody computed them."""
    detokenizer = language.detokenizer()
    texts, found, offset = [], [], 0
    for position, token in enumerate(tokens):
        found.append(Entry(Token(position, token), offset))
        texts.append(detokenizer.push(token))
        offset += len(texts[-1])
    texts.append(detokenizer.flush())
    text = prompt if isinstance(prompt, str) else "".join(texts)
    return Piece(text, [Entry(token, min(at, len(text))) for token, at in found] if entries else [])
