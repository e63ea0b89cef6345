"""/v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

from pdd_runtime.frontend.choice import Choice, Piece
from pdd_runtime.frontend.form import Form, encode
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.frontend.requests import ChatRequest
from pdd_runtime.pipeline import SessionRequest


class ChatForm(Form):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int) -> bytes:
        return self._event(index, b'"delta":{"role":"assistant","content":""}', None, b"null")

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode(text) + b"}"

    def _empty(self) -> bytes:
        return b'"delta":{}'

    def _message(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, piece: Piece) -> object:
        content = []
        for token, _ in piece.entries:
            top = [self._entry(other, logprob) for other, logprob in token.top]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, object]:
        return {
            "token": self.language.token_name(token),
            "logprob": logprob,
            "bytes": list(self.language.token_bytes(token)),
        }


async def chat_job(asked: ChatRequest, model: ServedModel, request_id: str) -> Job:
    """Raises `RequestError` where the request does not fit the model."""
    model.check(asked.model, "logprobs" if asked.logprobs else None)
    text = model.language.chat([message.for_template() for message in asked.messages])
    tokens = await model.language.encode(text, add_special_tokens=False)
    form = ChatForm(
        request_id,
        model.name,
        model.language,
        logprobs=bool(asked.logprobs),
        token_ids=bool(asked.return_token_ids),
        usage=asked.include_usage,
    )
    session = SessionRequest(
        id=request_id,
        tokens=tokens,
        max_tokens=model.room(
            len(tokens), asked.max_completion_tokens or asked.max_tokens, model.context_length, "messages"
        ),
        sampling=asked.sampling(model.language.eos_token_ids, (asked.top_logprobs or 0) if asked.logprobs else None),
        salt=asked.cache_salt or "",
    )
    choice = Choice(model.language, asked.stop or (), entries=form.wants_entries)
    return Job(form, (session,), (choice,), stream=bool(asked.stream))
