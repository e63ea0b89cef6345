from __future__ import annotations

import re

import pytest

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.frontend.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **special: str) -> str:
    return ChatTemplate(source, special).render(messages or USER)


def test_messages_special_tokens_and_the_generation_prompt_are_there() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert render(source, bos_token="<s>", eos_token="</s>") == "<s><user>hi</s><assistant>"


def test_block_lines_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n") == "hi\n"


def test_loop_controls_work() -> None:
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_tojson_is_plain_json_and_not_html() -> None:
    value = "{{ {'b': '<é&>', 'a': 1} | tojson }}"
    assert render(value) == '{"b": "<é&>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_today_is_known() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_the_training_mark_around_generated_text_is_transparent() -> None:
    source = "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{% endfor %}"
    assert render(source) == "hi"


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as raised:
        render("{{ raise_exception('roles must alternate') }}")
    assert raised.value.where == "messages"


def test_a_template_that_stumbles_over_the_messages_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="TypeError"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="UndefinedError"):
        render("{{ messages[7].content }}")


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}"]
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises((EngineError, RequestError)):
        render(source)


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(EngineError, match="chat template cannot be read"):
        render("{% for %}")
