"""The graph that most tests need: prefill and relay here, main behind a WAN."""

from __future__ import annotations


def pdd(
    name: str,
    *more: str,
    engine: str = "{plugin: scripted}",
    prefill: str = "",
    relay: str = "",
    main: str = "",
    wan: str = "bandwidth: 200Mbit/s, rtt: 10ms, emulate: true",
    model: str = "toy",
) -> str:
    """YAML with pools of those names in dc-a, dc-a and dc-b. `more`: lines of the spec. `prefill`, `relay`, `main`:
    what a pool has beside role, cluster and `engine`, e.g. `replicas: 2`."""

    def pool(role: str, cluster: str, own: str) -> str:
        return "{" + ", ".join(filter(None, (f"role: {role}", f"cluster: {cluster}", own, f"engine: {engine}"))) + "}"

    spec = "".join(f"  {line}\n" for line in more)
    return f"""\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {{name: {name}}}
spec:
  model: {{source: {model}}}
  clusters: {{dc-a: {{}}, dc-b: {{}}}}
  links:
    wan: {{between: [dc-a, dc-b], {wan}}}
  pools:
    prefill: {pool("prefill", "dc-a", prefill)}
    relay: {pool("relay", "dc-a", relay)}
    main: {pool("main", "dc-b", main)}
  edges:
    - {{from: prefill, to: relay, carries: kv, transport: {{plugin: tcp}}}}
    - {{from: prefill, to: main, carries: kv, transport: {{plugin: tcp}}, link: wan}}
    - {{from: relay, to: main, carries: tokens, link: wan}}
{spec}"""
