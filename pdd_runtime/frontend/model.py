"""The model this graph serves, and what it can take."""

from __future__ import annotations

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.errors import ContextTooLongError, UnknownModelError
from pdd_runtime.frontend.fields import Prompt
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.requests import Body
from pdd_runtime.plugins.engine import EngineInfo, Sampling


class ServedModel:
    def __init__(self, info: EngineInfo, language: Language) -> None:
        self.info, self.language = info, language
        self.name, self.context_length = info.model, info.context_length

    def check_name(self, name: str | None) -> None:
        """Raises where the request means another model."""
        if name is not None and name != self.name:
            why = f"this graph serves {self.name!r}"
            raise UnknownModelError(f"there is no model {name!r}", where="model", why=why)

    def check_sampling(self, asked: Body, sampling: Sampling) -> None:
        """Raises where the request means tokens that the vocabulary does not have."""
        size = self.language.vocabulary_size
        for field, tokens in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", asked.stop_token_ids or []),
        ):
            if max(tokens, default=0) >= size:
                raise RequestError(f"there is no token {max(tokens)}", where=field, why=f"the vocabulary has {size}")

    async def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """A plain prompt's tokens; token ids are taken as they are."""
        if isinstance(prompt, str):
            return await self.language.encode(prompt, add_special_tokens=True)
        if max(prompt, default=0) >= self.language.vocabulary_size:
            raise RequestError(
                f"there is no token {max(prompt)}",
                where="prompt",
                why=f"the vocabulary has {self.language.vocabulary_size}",
            )
        return prompt

    def room(self, prompt_tokens: int, asked: int | None, default: int, field: str, limit: str = "max_tokens") -> int:
        """How many tokens the answer may have: what was asked, else the default as far as the context goes. `field` has
        the prompt, and `limit` what was asked.

        Raises `RequestError` for an empty prompt, and where prompt and answer do not fit the context.
        """
        if prompt_tokens == 0:
            raise RequestError("the prompt is empty", where=field, why="it has no tokens to go on from")
        left = self.context_length - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            wanted = f" and {asked} more are asked for" if asked is not None else ""
            raise ContextTooLongError(
                f"the prompt has {prompt_tokens} tokens{wanted}; the context of {self.name} is {self.context_length}",
                where=field if left < 1 else limit,
                fix="shorten the prompt" if left < 1 else f"ask for at most {left}",
            )
        return min(default, left) if asked is None else asked
