from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import loads
from pdd_runtime.graph.secrets import in_line, redacted, revealed, values
from pdd_runtime.hiding import HIDDEN

CANARY = "canary-7f3a"
PLACE = "{role: main, cluster: dc-b, engine: {plugin: some}}"


def fault(text: str, *overrides: str) -> str:
    with pytest.raises(GraphError) as caught:
        loads(text, overrides, "g.yaml")
    return str(caught.value)


def with_main(pdd: str, more: str, config: str = "{}") -> str:
    assert PLACE in pdd
    return pdd.replace(PLACE, f"{{role: main, cluster: dc-b, {more}engine: {{plugin: some, config: {config}}}}}")


@pytest.mark.parametrize(
    ("more", "config", "what"),
    [
        (f"env: {{HF_TOKEN: {CANARY}}}, ", "{}", "HF_TOKEN stands in the graph itself"),
        ("", f"{{env: {{OPENAI_API_KEY: {CANARY}}}}}", "OPENAI_API_KEY stands"),
        ("", f"{{args: [--api-key, {CANARY}]}}", "--api-key stands"),
        ("", f"{{args: [--api-key={CANARY}]}}", "--api-key stands"),
        ("", f"{{url: 'http://user:{CANARY}@127.0.0.1:8000'}}", "the password of a URL stands"),
    ],
)
def test_a_secret_that_stands_in_the_graph_is_refused_and_not_repeated(
    pdd: str, more: str, config: str, what: str
) -> None:
    said = fault(with_main(pdd, more, config))
    assert what in said
    assert "write ${NAME} for a variable of the environment, or ${file:/PATH}" in said
    assert CANARY not in said
    assert said.startswith("g.yaml:16: "), "no column, so that no command shows the line"


def test_a_secret_on_the_command_line_is_not_repeated(pdd: str) -> None:
    for override in ("pools.main.env.HF_TOKEN", "pools.main.env.HF_TOKEN.x", "model.HF_TOKEN"):
        assert CANARY not in fault(pdd, f"spec.{override}={CANARY}")
    assert f"--set spec.pools.main.env.HF_TOKEN={HIDDEN}" in fault(pdd, f"spec.pools.main.env.HF_TOKEN={CANARY}")


def test_a_secret_of_the_wrong_type_is_not_repeated(pdd: str) -> None:
    said = fault(with_main(pdd, "env: {HF_TOKEN: 73817381}, "))
    assert f"spec.pools.main.env.HF_TOKEN is '{HIDDEN}'" in said
    assert "73817381" not in said


@pytest.mark.parametrize(
    "more",
    [
        "env: {HF_TOKEN: '${HF_TOKEN}', BIG_KEY: '${file:/etc/key}', MAX_TOKEN: '128', NO_TOKEN: ''}, ",
        "env: {TOKENIZERS_PARALLELISM: 'on', KEYS: 'a', MONKEY_BARS: 'b'}, ",
    ],
)
def test_what_refers_to_a_secret_or_is_none_is_right(pdd: str, more: str) -> None:
    assert loads(with_main(pdd, more)).graph.spec.pools["main"].env


def test_references_stand_for_variables_and_files_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{CANARY}\n")
    config = {
        "env": {"A": "${TOKEN}"},
        "args": ("--api-key", "x-${TOKEN}-${file:%s}" % (tmp_path / "key")),
        "template": "$${TOKEN} $TOKEN",
        "streams": 4,
    }
    assert revealed(config, "here", {"TOKEN": "t0p"}) == {
        "env": {"A": "t0p"},
        "args": ("--api-key", f"x-t0p-{CANARY}"),
        "template": "${TOKEN} $TOKEN",
        "streams": 4,
    }
    assert sorted({*values(config, {"TOKEN": "t0p"})}) == [CANARY, "t0p"]
    assert sorted({*values(config, {})}) == [CANARY]


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        ("${NONE}", "the environment has no NONE"),
        ("${file:/no/such/file}", "the secret in /no/such/file cannot be read"),
        ("${file:key}", "it is no whole path"),
        ("${file:/dev/zero}", "more than 65536 bytes"),
        ("${file:}", "it is no whole path"),
        ("${not a name}", "names no variable"),
    ],
)
def test_a_reference_to_nothing_says_where_it_stands(reference: str, what: str) -> None:
    with pytest.raises(GraphError, match=r"^spec\.pools\.main\.env\.A: ") as caught:
        revealed({"A": reference}, "spec.pools.main.env", {"OTHER": CANARY})
    assert what in str(caught.value)
    assert CANARY not in str(caught.value)


def test_what_is_shown_has_no_secret_in_it() -> None:
    shown = redacted({"env": {"A_TOKEN": CANARY, "B": "b", "C_KEY": "${C}"}, "url": f"http://u:{CANARY}@h/", "n": 1})
    assert shown == {"env": {"A_TOKEN": HIDDEN, "B": "b", "C_KEY": "${C}"}, "url": f"http://u:{HIDDEN}@h/", "n": 1}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  env: {HF_TOKEN: abc def, A: b}", "  env: {HF_TOKEN: *******, A: b}"),
        ("  'HF_TOKEN': \"a, b}\"", "  'HF_TOKEN': *******"),
        ("  args: [--api-key, abc, --port, 1, --key=abc]", "  args: [--api-key, ***, --port, 1, --key=***]"),
        ("  env: {HF_TOKEN: '${HF}', tokens: 3}", "  env: {HF_TOKEN: '${HF}', tokens: 3}"),
        ("  url: http://user:abc@host:80/", "  url: http://user:***@host:80/"),
    ],
)
def test_a_line_that_is_shown_has_stars_for_secrets_and_keeps_its_length(line: str, shown: str) -> None:
    assert in_line(line) == shown
