"""Graphs that are measured in tests, on the scripted engine."""

from __future__ import annotations

from pdd_runtime.graph import Graph
from pdd_runtime.graph.document import parse

TOKEN_TIME, PREFILL_RATE, TOKEN_BYTES = 0.02, 2000, 128
ENGINE = f"{{plugin: scripted, config: {{token_time: {TOKEN_TIME}, prefill_rate: {PREFILL_RATE}}}}}"
AGGREGATED = f"""
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {{name: one-pool}}
spec:
  model: {{source: toy}}
  clusters: {{dc-a: {{}}}}
  pools:
    main: {{role: aggregated, cluster: dc-a, engine: {ENGINE}}}
"""
PDD = f"""
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {{name: three-pools}}
spec:
  model: {{source: toy}}
  clusters: {{dc-a: {{}}, dc-b: {{}}}}
  links:
    wan: {{between: [dc-a, dc-b], bandwidth: 2Mbit/s, rtt: 20ms, emulate: true}}
  pools:
    prefill: {{role: prefill, cluster: dc-a, engine: &e {ENGINE}}}
    relay: {{role: relay, cluster: dc-a, engine: *e}}
    main: {{role: main, cluster: dc-b, engine: *e}}
  edges:
    - {{from: prefill, to: relay, carries: kv, transport: {{plugin: tcp}}}}
    - {{from: prefill, to: main, carries: kv, transport: {{plugin: tcp}}, link: wan}}
    - {{from: relay, to: main, carries: tokens, link: wan}}
"""


def graph(text: str) -> Graph:
    """Not checked against plugins."""
    return Graph.model_validate(parse(text, "graph.yaml").data)
