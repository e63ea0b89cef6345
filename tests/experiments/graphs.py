"""Graphs that are measured in tests, on the scripted engine."""

from __future__ import annotations

from pdd_runtime.graph import Graph
from pdd_runtime.graph.document import parse
from tests.graphs import pdd

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
PDD = pdd("three-pools", engine=ENGINE, wan="bandwidth: 2Mbit/s, rtt: 20ms, emulate: true")


def graph(text: str) -> Graph:
    """Not checked against plugins."""
    return Graph.model_validate(parse(text, "graph.yaml").data)
