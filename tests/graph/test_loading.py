from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import Graph, GraphErrors, load, loads
from pdd_runtime.graph.document import MAX_BYTES


def fault(text: str, *overrides: str) -> str:
    with pytest.raises(GraphError) as caught:
        loads(text, overrides, "g.yaml")
    return str(caught.value)


def test_a_whole_graph_loads_with_defaults_and_units(pdd: str) -> None:
    graph = loads(pdd).graph
    assert graph.name == "demo"
    assert graph.spec.links["wan"].bandwidth == 200e6
    assert graph.spec.links["wan"].rtt == 0.05
    assert graph.spec.pools["main"].replicas == 1
    assert graph.spec.handoff.plugin == "catch-up"
    assert graph.spec.frontend.port == 8000
    assert graph.frontend_cluster == "dc-a"


def test_what_workers_get_as_json_is_the_same_graph(pdd: str) -> None:
    loaded = loads(pdd, ["spec.slo.ttft_p90=1234us", "spec.links.wan.bandwidth=0.3Mbit/s"])
    assert Graph.model_validate_json(loaded.to_json()) == loaded.graph
    assert loads(loaded.to_json()).graph == loaded.graph


def test_a_value_is_found_again_by_line_and_column(pdd: str) -> None:
    loaded = loads(pdd, ["spec.pools.main.replicas=2"], "g.yaml")
    assert loaded.locate(("spec", "pools", "main", "engine", "plugin")) == "g.yaml:16:56"
    assert loaded.locate(("spec", "pools", "main", "engine", "config", "x")) == "g.yaml:16:47"
    assert loaded.locate(("spec", "edges", 1)) == "g.yaml:19:7"
    assert loaded.locate(("spec", "pools", "main", "replicas")) == "--set spec.pools.main.replicas=2"


def test_an_unknown_key_names_the_nearest(pdd: str) -> None:
    text = pdd.replace("{role: main,", "{role: main, replica: 2,")
    assert fault(text) == (
        'g.yaml:16:24: unknown key "replica" in spec.pools.main\n'
        "  why: the keys here are role, cluster, replicas, hardware, engine, model, env\n"
        '  fix: did you mean "replicas"?'
    )


def test_a_missing_key_says_where_it_belongs(pdd: str) -> None:
    text = pdd.replace("{role: main, cluster: dc-b, engine: {plugin: some}}", "{role: main, cluster: dc-b}")
    assert fault(text) == (
        'g.yaml:16:11: spec.pools.main has no "engine"\n  why: it is required: the engine plugin that computes\n'
        '  fix: add "engine:" below it'
    )


def test_a_duplicate_key_names_both_lines(pdd: str) -> None:
    text = pdd.replace("    main: {role", "    relay: {role")
    assert fault(text) == (
        'g.yaml:16:5: the key "relay" stands twice in spec.pools\n  why: it is on line 15 already\n'
        "  fix: keep one of them"
    )


def test_every_fault_is_told_at_once_in_the_files_order(pdd: str) -> None:
    text = pdd.replace("rtt: 50ms", "rtt: 50").replace("carries: tokens", "carries: token").replace("demo", "De mo")
    with pytest.raises(GraphErrors) as caught:
        loads(text, [], "g.yaml")
    assert str(caught.value) == (
        'g.yaml:3:18: "De mo" in metadata.name is not a name\n'
        "  why: names are lower-case letters, digits and dashes, at most 63, with no dash at either end\n"
        '  fix: did you mean "de-mo"?\n'
        "g.yaml:11:61: spec.links.wan.rtt is 50\n"
        "  why: 50 is not a duration: write a number and one of us, ms, s, min\n"
        '  fix: write it like "50ms"\n'
        "g.yaml:20:40: spec.edges.2.carries is 'token'\n"
        "  why: it must be kv or tokens\n"
        '  fix: did you mean "tokens"?'
    )
    assert len(caught.value.errors) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{role: main,",
            '{role: main, replicas: "2",',
            "g.yaml:16:34: spec.pools.main.replicas is '2'\n  why: it must be a whole number\n"
            "  fix: leave it out for the default, 1",
        ),
        (
            "{role: main,",
            "{role: main, replicas: 0,",
            "g.yaml:16:34: spec.pools.main.replicas is 0\n  why: it should be greater than or equal to 1\n"
            "  fix: leave it out for the default, 1",
        ),
        (
            "{role: main,",
            "{role: main, env: {THREADS: 1},",
            "g.yaml:16:39: spec.pools.main.env.THREADS is 1\n  why: it must be text\n"
            "  fix: write it in quotes, so that YAML reads it as text",
        ),
        (
            "rtt: 50ms",
            "rtt: 50ms, emulate: maybe",
            "g.yaml:11:76: spec.links.wan.emulate is 'maybe'\n  why: it must be true or false\n"
            "  fix: leave it out for the default, false",
        ),
        (
            "200Mbit/s",
            "0Mbit/s",
            "g.yaml:11:45: spec.links.wan.bandwidth is '0Mbit/s'\n  why: it should be greater than 0\n"
            "  fix: docs/graph.md says what may stand here",
        ),
        (
            "200Mbit/s",
            "200MB",
            "g.yaml:11:45: spec.links.wan.bandwidth is '200MB'\n"
            "  why: '200MB' is not a bandwidth: write a number and one of bit/s, kbit/s, Mbit/s, Gbit/s\n"
            '  fix: write it like "200Mbit/s"',
        ),
        (
            "between: [dc-a, dc-b]",
            "between: [dc-a]",
            "g.yaml:11:20: spec.links.wan.between lacks item 2\n  why: it is required: the two clusters it joins\n"
            "  fix: add it to the list",
        ),
        (
            "    dc-c: {}",
            "    dc-c:",
            "g.yaml:9:10: spec.clusters.dc-c is empty\n  why: it must be a mapping (key: value)\n"
            "  fix: docs/graph.md says what may stand here",
        ),
        (
            "    dc-c: {}",
            "    no: {}",
            'g.yaml:9:5: a key must be text\n  why: YAML reads no as false\n  fix: write "no" in quotes',
        ),
        (
            "    dc-c: {}",
            "    ../x: {}",
            'g.yaml:9:5: "../x" in spec.clusters is not a name\n'
            "  why: names are lower-case letters, digits and dashes, at most 63, with no dash at either end\n"
            '  fix: did you mean "x"?',
        ),
        (
            "pdd/v1alpha1",
            "pdd/v1",
            "g.yaml:1:13: apiVersion is 'pdd/v1'\n  why: it must be pdd/v1alpha1\n"
            '  fix: did you mean "pdd/v1alpha1"?',
        ),
        (
            "{source: tiny}",
            "!!python/object/apply:os.system [id]",
            "g.yaml:5:10: the YAML tag !!python/object/apply:os.system has no meaning in a graph\n"
            "  fix: write plain values",
        ),
        (
            "  model: {source",
            "  model: {{source",
            "g.yaml:6:3: this is not valid YAML: expected ',' or '}', but got '<scalar>'\n"
            "  why: while parsing a flow mapping on line 5\n"
            "  fix: look at the indentation (spaces only), quotes and brackets on this line and the one before",
        ),
        (
            "  clusters:",
            "\tclusters:",
            "g.yaml:6:1: this is not valid YAML: found character '\\t' that cannot start any token\n"
            "  why: while scanning for the next token\n"
            "  fix: look at the indentation (spaces only), quotes and brackets on this line and the one before",
        ),
        (
            "tiny",
            "ti\x07ny",
            "g.yaml:5: the YAML holds a character that may not stand there\n"
            "  why: U+0007: special characters are not allowed\n"
            "  fix: remove it, or write it as an escape in double quotes",
        ),
    ],
)
def test_a_wrong_value_is_told_with_its_place_cause_and_fix(pdd: str, old: str, new: str, message: str) -> None:
    assert fault(pdd.replace(old, new)) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "g.yaml: the file is empty\n  fix: docs/graph.md shows the form, graphs/ has examples"),
        ("# only a comment\n", "g.yaml: the file is empty\n  fix: docs/graph.md shows the form, graphs/ has examples"),
        (
            "- a\n- b\n",
            "g.yaml:1:1: the graph is a list\n  why: it must be a mapping (key: value)\n"
            "  fix: docs/graph.md shows the form, graphs/ has examples",
        ),
        (
            "just words",
            "g.yaml:1:1: the graph is text\n  why: it must be a mapping (key: value)\n"
            "  fix: docs/graph.md shows the form, graphs/ has examples",
        ),
        (
            "a: 1\n---\nb: 2\n",
            "g.yaml:2:1: this is not valid YAML: but found another document\n"
            "  why: expected a single document in the stream on line 1\n"
            "  fix: look at the indentation (spaces only), quotes and brackets on this line and the one before",
        ),
        (
            "a: {{ name }}\n",
            "g.yaml:1:5: a key must be text\n  why: this one is a mapping\n  fix: write a name before the colon; "
            "what has braces, as a template's {{ name }}, goes in quotes",
        ),
        (
            "~: 1\n",
            "g.yaml:1:1: a key must be text\n  why: this one is empty\n  fix: write a name before the colon; "
            "what has braces, as a template's {{ name }}, goes in quotes",
        ),
        ("[" * 5000, "g.yaml: the YAML is nested too deeply\n  why: at most 32 levels"),
        ("a: &a [*a]\n", "g.yaml:1:4: the YAML is nested too deeply\n  why: at most 32 levels with aliases"),
        ("a: &a {<<: *a}\n", "g.yaml:1:4: << is nested too deeply"),
    ],
)
def test_what_is_no_graph_at_all_is_told_so(text: str, message: str) -> None:
    assert fault(text) == message


def test_an_alias_bomb_is_stopped() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "the graph holds too many values" in fault("\n".join(lines))


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(GraphError) as caught:
            load(path)
        return str(caught.value).replace(str(tmp_path), "DIR")

    assert (
        message(tmp_path / "none.yaml")
        == "DIR/none.yaml: there is no such file\n  fix: give the path of a graph's YAML"
    )
    assert message(tmp_path) == "DIR: this is a directory\n  fix: give the path of a graph's YAML"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nb: é\n".encode("latin-1"))
    assert message(latin).startswith("DIR/latin.yaml:2: the file is not UTF-8 text")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    assert message(large).startswith("DIR/large.yaml: the file is too large for a graph")


def test_anchors_and_merges_save_typing(pdd: str) -> None:
    text = pdd.replace("prefill: {role", "prefill: &base {role").replace(
        "relay: {role: relay, cluster: dc-a, engine: {plugin: some}}", "relay: {<<: *base, role: relay}"
    )
    loaded = loads(text, [], "g.yaml")
    assert loaded.graph == loads(pdd).graph
    assert loaded.locate(("spec", "pools", "relay", "role")) == "g.yaml:15:30"
    assert loaded.locate(("spec", "pools", "relay", "cluster")).startswith("g.yaml:14:")


@given(st.text(max_size=200) | st.text(alphabet="ab:{}[]&*!-?|>'\"\\ \n\t#%@0.<~", max_size=60))
def test_no_text_makes_anything_but_a_graph_error(text: str) -> None:
    with pytest.raises(GraphError):
        loads(text)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_PLACES = [
    "apiVersion",
    "metadata",
    "metadata.name",
    "spec",
    "spec.model",
    "spec.model.mode",
    "spec.links.wan",
    "spec.links.wan.between",
    "spec.links.wan.rtt",
    "spec.links.wan.streams",
    "spec.pools",
    "spec.pools.main",
    "spec.pools.main.env",
    "spec.edges",
    "spec.edges.1",
    "spec.edges.1.from",
    "spec.slo",
    "spec.frontend.port",
    "spec.routing",
]


@given(st.sampled_from(_PLACES), _json)
def test_no_value_anywhere_makes_anything_but_a_graph_error(pdd: str, place: str, value: object) -> None:
    with suppress(GraphError):
        loads(pdd, [f"{place}={json.dumps(value)}"])


def test_a_misspelt_key_is_told_once_and_not_as_missing_too(pdd: str) -> None:
    assert fault(pdd.replace("bandwidth: 200Mbit/s", "bandwith: 200Mbit/s")) == (
        'g.yaml:11:34: unknown key "bandwith" in spec.links.wan\n'
        "  why: the keys here are between, bandwidth, rtt, jitter, streams, price, emulate\n"
        '  fix: did you mean "bandwidth"?'
    )


def test_a_unit_of_another_tool_is_told_in_ours(pdd: str) -> None:
    assert fault(pdd.replace("200Mbit/s", "200Mbps")) == (
        "g.yaml:11:45: spec.links.wan.bandwidth is '200Mbps'\n"
        "  why: '200Mbps' is not a bandwidth: write a number and one of bit/s, kbit/s, Mbit/s, Gbit/s\n"
        '  fix: did you mean "200Mbit/s"?'
    )
