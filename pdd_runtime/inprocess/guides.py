"""The form that guided output must have: compiled once, followed token by token."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

if TYPE_CHECKING:
    # Known to the type checker alone.
    from llguidance._lib import JsonCompileOptions

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.plugins.engine import Guide, TokenizerFiles

_KEPT = 64
"""Compiled guides that are kept: those used last."""
_LONGEST = 2**18
"""Characters of a guide: the longest ones take about a second to compile, and others wait for that."""
_FIELDS = {"json_schema": "response_format", "json_object": "response_format"}
"""The request's field that a bad guide of this kind came in; others have a field of their own name."""
_JSON: JsonCompileOptions = {"whitespace_pattern": r"\n?[ \t]{0,20}"}
"""Enough to indent, and an end to it: small models like to write blanks for ever."""


class Guides:
    """Compiles guides for one model. Every method runs in the same thread, which is not the event loop's."""

    def __init__(self, files: TokenizerFiles, vocab: int) -> None:
        """Takes some tenths of a second. Raises `EngineError` where the tokenizer is of a kind it cannot follow."""
        self._files, self._vocab = files, vocab
        try:
            self._tokenizer = LLTokenizer(
                files.tokenizer_json, n_vocab=vocab, eos_token=list(files.eos_token_ids) or None
            )
        except Exception as error:  # whatever the library's own code may raise
            raise EngineError("the model's tokenizer cannot be guided", why=str(error)) from error
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    def follow(self, guide: Guide, output: Iterable[int], stop_token_ids: Iterable[int]) -> GuideState:
        """The state of `guide` behind `output`. Raises `RequestError` for a guide that cannot be compiled,
        `EngineError` for an output that is not of its form."""
        eos = self._files.eos_token_ids
        ends = tuple(token for token in stop_token_ids if 0 <= token < self._vocab) or eos
        state = GuideState(self._compile(guide).deep_copy(), ends, eos)
        for token in output:
            state.accept(token)
        return state

    def _compile(self, guide: Guide) -> LLMatcher:
        if guide in self._compiled:
            self._compiled.move_to_end(guide)
            return self._compiled[guide]
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(guide), log_level=0)
        except ValueError as error:
            raise _unusable(guide, str(error)) from error
        if matcher.is_error():
            raise _unusable(guide, matcher.get_error())
        self._compiled[guide] = matcher
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return matcher


class GuideState:
    """Where one request's output stands in its guide. Each output token is accepted exactly once."""

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...], eos: tuple[int, ...]) -> None:
        """`ends`: the tokens that may end the output once the form is complete; `eos`: the model's own ones."""
        self._matcher, self._ends, self._never = matcher, ends, tuple(set(eos) - set(ends))
        self._ended = False

    def mask(self) -> bytearray:
        """The tokens that may come next: a bit each, the lowest first. Where the form may end here the end tokens are
        among them; where it is complete they alone are."""
        bits = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise EngineError("the request's grammar cannot be followed further", why=self._matcher.get_error())
        if self._ended:
            bits = bytearray(len(bits))
        if self._ended or self._matcher.is_accepting():
            for token in self._never:
                bits[token >> 3] &= ~(1 << (token & 7))
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bits

    def accept(self, token: int) -> None:
        """Go on by one token of the output. Raises `EngineError` where it does not fit."""
        if token in self._ends and (self._ended or self._matcher.is_accepting()):
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise EngineError(
                f"token {token} is not of the form that the request asks for",
                why=self._matcher.get_error() or "the output had ended",
            )


def _grammar(guide: Guide) -> str:
    """In the compiler's own form. Raises `ValueError`."""
    if len(guide.text) > _LONGEST:
        raise ValueError(f"it has {len(guide.text)} characters, more than {_LONGEST}")
    match guide.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(guide.text, defaults=_JSON)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON)
        case "regex":
            return LLMatcher.grammar_from_regex(guide.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(guide.text)
        case "choice":
            choices = json.loads(guide.text)
            if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
                raise ValueError("it must be a list of one or more strings that are not empty")
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            )
    raise ValueError(f"unknown kind: {guide.kind}")


def _unusable(guide: Guide, why: str) -> RequestError:
    where = _FIELDS.get(guide.kind, guide.kind)
    return RequestError(f"this {guide.kind} cannot be used", where=where, why=" ".join(why.split()))
