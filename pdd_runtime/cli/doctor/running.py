"""A running graph: are its processes well, and do bytes really move over each of its edges?"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pdd_runtime.cli.ask import fetch_timeline, get, model_name, post
from pdd_runtime.cli.doctor.check import Check
from pdd_runtime.cli.doctor.host import size
from pdd_runtime.cli.front import Front
from pdd_runtime.errors import PddError
from pdd_runtime.graph import Edge, Graph
from pdd_runtime.launch import GraphStatus

_WORDS, _TOKENS = 64, 24
"""Of the probe: its prompt is new, so that no cache spares a transfer, and its answer is long enough for a handoff."""
_SETTLED = 20.0
"""Seconds for KV that still crosses when the answer is complete."""
_TOO_FAST = 1.5
"""Times a link's bandwidth: so much faster, and what should be shaped is not."""


def processes(status: GraphStatus) -> Iterator[Check]:
    for process in status.processes:
        name = f"{process.pool}/{process.index}"
        again = f", started again {process.restarts} times" if process.restarts else ""
        found = f"{process.state}{again}" + (f": {process.note}" if process.state == "backoff" else "")
        logs = f"pdd-runtime logs {name} -g {status.name}"
        if process.state != "ready":
            yield Check("running", name, "fail", found, logs)
        else:
            yield Check("running", name, "warn" if again else "ok", found, logs if again else "")
    found = f"requests are answered at {status.url}" if status.ready else status.why_not_ready
    yield Check("running", "frontend", "ok" if status.ready else "fail", found)


async def edges(graph: Graph, front: Front) -> list[Check]:
    """Send a request that nobody has sent before and see what crossed; for edges off its route, what the frontend
    has counted since it started."""
    try:
        timeline = await _probe(front)
        async with front.client(admin=True) as http:
            counted = _counted((await get(http, "/metrics")).text)
    except PddError as error:
        return [Check("running", "probe", "fail", error.what, error.fix or "pdd-runtime logs")]
    route = f"route {timeline['route']}: {timeline['prompt_tokens']} prompt tokens, {_TOKENS} asked for"
    if timeline["error"]:
        return [
            Check("running", "probe", "fail", f"{route}: {timeline['error']}", f"pdd-runtime timeline {timeline['id']}")
        ]
    checks = [Check("running", "probe", "ok", route)]
    return checks + [_edge(graph, edge, timeline, counted) for edge in graph.spec.edges]


async def _probe(front: Front) -> dict[str, Any]:
    prompt = " ".join(secrets.token_hex(2) for _ in range(_WORDS))
    model = await model_name(front)
    async with front.client() as http:
        body = {"model": model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0}
        answer = await post(http, "/v1/completions", body)
    async with front.client(admin=True) as http:
        return await fetch_timeline(http, answer.headers["x-pdd-request-id"], _SETTLED, settled=True)


def _edge(graph: Graph, edge: Edge, timeline: Mapping[str, Any], counted: Mapping[str, float]) -> Check:
    name = f"{edge.source} → {edge.target} ({'KV' if edge.carries == 'kv' else 'tokens'})"
    if edge.carries == "tokens":
        return _tokens(name, timeline)
    key = f"{edge.source}->{edge.target}"
    moved = [transfer for transfer in timeline["kv"] if transfer["edge"] == key]
    if moved:
        count, goodput = sum(one["bytes"] for one in moved), moved[-1]["goodput"]
        if not count:
            fix = f"see `pdd-runtime logs {edge.target}` and `pdd-runtime timeline {timeline['id']}`"
            return Check("running", name, "fail", "no byte crossed: the KV was computed again at the other side", fix)
        found = f"{size(count)} crossed" + (f" at {goodput * 8e-6:.3g} Mbit/s" if goodput else "")
        link = graph.spec.links[edge.link] if edge.link else None
        if link and link.emulate and goodput and goodput * 8 > _TOO_FAST * link.bandwidth:
            fix = f"the transport {edge.transport.plugin if edge.transport else ''} does not shape what it sends"
            return Check("running", name, "warn", f"{found}, faster than link {edge.link}", fix)
        return Check("running", name, "ok", found)
    if counted.get(key):
        return Check("running", name, "ok", f"not on the probe's route; {size(counted[key])} since the start")
    return Check("running", name, "ok", "not on the probe's route, and nothing crossed it yet")


def _tokens(name: str, timeline: Mapping[str, Any]) -> Check:
    handoff, made = timeline["handoff"], timeline["tokens"]["relay"]
    if handoff is None:
        return Check("running", name, "ok", "not on the probe's route")
    if handoff["sealed_at"] is None:
        return Check("running", name, "ok", f"the probe ended on the relay after {made} tokens: no handoff was needed")
    return Check("running", name, "ok", f"{made} tokens handed off, gap {(handoff['gap'] or 0.0) * 1e3:.0f} ms")


def _counted(metrics: str) -> dict[str, float]:
    """KV bytes by edge, from a scrape."""
    return {
        sample.labels["edge"]: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "pdd_kv_bytes_total"
    }
