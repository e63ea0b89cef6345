from __future__ import annotations

import pytest

PDD = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: demo}
spec:
  model: {source: tiny}
  clusters:
    dc-a: {}
    dc-b: {}
    dc-c: {}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 200Mbit/s, rtt: 50ms}
    far: {between: [dc-a, dc-c], bandwidth: 1Gbit/s, rtt: 90ms}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: {plugin: some}}
    relay: {role: relay, cluster: dc-a, engine: {plugin: some}}
    main: {role: main, cluster: dc-b, engine: {plugin: some}}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: wire}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: wire}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
"""


@pytest.fixture(scope="session")
def pdd() -> str:
    """A whole graph, with places that the tests know."""
    return PDD
