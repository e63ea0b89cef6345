from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pdd_runtime.cli.dot import dot
from pdd_runtime.cli.svg import svg
from pdd_runtime.graph import load, loads
from tests.cli.shell import Cli

QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
SVG = "{http://www.w3.org/2000/svg}"

SITES = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: sites}
spec:
  model: {source: tiny}
  clusters: {a: {}, b: {}, c: {}, d: {}}
  links:
    ab: {between: [a, b], bandwidth: 10Gbit/s, rtt: 8ms}
    ac: {between: [a, c], bandwidth: 1Gbit/s, rtt: 220ms}
    ad: {between: [a, d], bandwidth: 1Gbit/s, rtt: 90ms, emulate: true}
  pools:
    prefill: {role: prefill, cluster: a, engine: {plugin: "x<&>\\"y"}}
    relay: {role: relay, cluster: a, engine: {plugin: some}}
    near: {role: main, cluster: a, engine: {plugin: some}}
    m1: {role: main, cluster: b, engine: {plugin: some}}
    m2: {role: main, cluster: c, engine: {plugin: some}}
    m3: {role: main, cluster: d, engine: {plugin: some}}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: near, carries: kv, transport: {plugin: tcp}}
    - {from: relay, to: near, carries: tokens}
    - {from: prefill, to: m1, carries: kv, transport: {plugin: tcp}, link: ab}
    - {from: prefill, to: m2, carries: kv, transport: {plugin: tcp}, link: ac}
    - {from: prefill, to: m3, carries: kv, transport: {plugin: tcp}, link: ad}
"""


def drawn(text: str) -> tuple[ET.Element, list[str]]:
    root = ET.fromstring(text)
    return root, [str(element.text) for element in root.iter(f"{SVG}text")]


def test_the_svg_shows_every_part() -> None:
    root, texts = drawn(svg(load(QUICKSTART).graph))
    assert texts[0] == "quickstart serves smollm2, float32, fast mode"
    assert {"dc-a", "dc-b", "wan", "200Mbit/s", "prefill", "relay", "main", "frontend", "127.0.0.1:8000"} <= set(texts)
    assert texts.count("KV by tcp") == 2
    assert texts.count("token IDs") == 1
    assert len([path for path in root.iter(f"{SVG}path") if "marker-end" in path.attrib]) == 3


def test_pools_never_lie_on_each_other_and_nothing_leaves_the_picture() -> None:
    root, _ = drawn(svg(loads(SITES).graph))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [
        tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        for rect in root.iter(f"{SVG}rect")
        if rect.attrib.get("width") != "100%"
    ]
    for x, y, wide, high in boxes:
        assert x >= 0
        assert y >= 0
        assert x + wide <= width
        assert y + high <= height
    pools = [box for box in boxes if box[3] == 50]
    assert len(pools) == 7
    for index, (x, y, wide, high) in enumerate(pools):
        for x2, y2, wide2, high2 in pools[index + 1 :]:
            assert x + wide <= x2 or x2 + wide2 <= x or y + high <= y2 or y2 + high2 <= y


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("text", [QUICKSTART.read_text(), SITES], ids=["quickstart", "sites"])
def test_graphviz_reads_the_dot(text: str) -> None:
    done = subprocess.run(
        ["dot", "-Tplain"], input=dot(loads(text).graph), capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
    assert done.stdout.count("\nedge ") == len(loads(text).graph.spec.edges)


def test_the_mermaid_is_what_the_forge_draws(cli: Cli) -> None:
    assert cli("graph", str(QUICKSTART), "--format", "mermaid").out.splitlines()[:12] == [
        "flowchart LR",
        '  subgraph cluster_dc_a["dc-a"]',
        '    pool_frontend["frontend<br/>127.0.0.1:8000"]:::frontend',
        '    pool_prefill["prefill<br/>1 × llamacpp"]:::prefill',
        '    pool_relay["relay<br/>1 × llamacpp"]:::relay',
        "  end",
        '  subgraph cluster_dc_b["dc-b"]',
        '    pool_main["main<br/>1 × llamacpp"]:::main',
        "  end",
        '  pool_prefill ==>|"KV by tcp"| pool_relay',
        '  pool_prefill ==>|"KV by tcp<br/>wan: 200Mbit/s, 50ms there and back, emulated"| pool_main',
        '  pool_relay -.->|"token IDs<br/>wan: 200Mbit/s, 50ms there and back, emulated"| pool_main',
    ]


def test_the_graph_is_printed_in_every_form(cli: Cli) -> None:
    text = cli("graph", str(QUICKSTART), "--set", "spec.frontend.port=9000")
    assert "127.0.0.1:9000" in text.out
    assert json.loads(cli("graph", str(QUICKSTART), "--format", "json").out)["spec"]["pools"]["main"]["env"] == {}
    assert cli("graph", str(QUICKSTART), "--format", "svg").out == svg(load(QUICKSTART).graph)
    assert cli("graph", str(QUICKSTART), "--format", "dot").out == dot(load(QUICKSTART).graph)
    assert cli("graph", "none.yaml", "--format", "svg").code == 2


def test_variants_are_told_with_what_they_get(cli: Cli) -> None:
    variants = "spec.variants={old: {weight: 3, pools: [prefill, main]}, new: {routing: {plugin: predictive}}}"
    lines = cli("graph", str(QUICKSTART), "--set", variants).out.splitlines()
    assert [line.strip() for line in lines[-2:]] == [
        "variant old (control)  75% of requests, in prefill, main",
        "variant new  25% of requests, by predictive",
    ]


def test_the_schema_is_printed_with_the_installed_plugins(cli: Cli) -> None:
    schema = json.loads(cli("schema").out)
    assert "scripted" in schema["$defs"]["PluginRef.engine"]["properties"]["plugin"]["enum"]
    assert schema["$defs"]["engine.scripted"]["properties"]["token_time"]["description"]
