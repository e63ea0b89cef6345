"""Chat templates, rendered as Hugging Face's templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from pdd_runtime.errors import EngineError, RequestError


class _Refused(jinja2.TemplateError):
    """The template's own `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; a prompt is not HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """Messages become the prompt's text. The template comes with the model and runs in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `EngineError` where `source` is no template. `special_tokens`: `bos_token` and so on."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            """What the template can be told, such as `tools` and `enable_thinking`."""
        except jinja2.TemplateError as error:
            raise EngineError("the model's chat template cannot be read", why=str(error)) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, ready for the assistant's next words; `more`: further variables. Raises `RequestError` where the
        template refuses the messages."""
        variables = {"documents": None, **self._special_tokens, **(more or {})}
        variables |= {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": True}
        try:
            return self._template.render(variables)
        except _Refused as error:
            raise RequestError(
                "the model's chat template refuses these messages", where="messages", why=str(error)
            ) from error
        except SecurityError as error:
            raise EngineError("the model's chat template does what it may not", why=str(error)) from error
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            # A template that indexes or concatenates what is not there fails in whatever way Python does.
            raise RequestError(
                "the model's chat template cannot render these messages",
                where="messages",
                why=f"{type(error).__name__}: {error}",
            ) from error
