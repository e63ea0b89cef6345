"""Servers under one graph, brought up as a user would, and what one plain SGLang server says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from pdd_sglang import testing

from pdd_runtime.ids import new_id
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.plugins.engine import ModelSpec, Sampling
from pdd_runtime.server.metrics import scrape
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.tiny_model import write_tiny_model
from tests.integration.stack import Stack
from tests.waiting import until

LONG = 1500.0
"""Seconds for a server to start on a machine that has other things to do."""
TOKENS = 30
RELAYED = 7
"""Output tokens before the handoff, but for the first, which is prefill's."""
POOLS = ("prefill", "relay", "main")
PROMPTS = {n: tuple(random.Random(n).choices(range(256), k=n)) for n in (3, 64, 130, 333)}
RELAY_KV = "spec.edges.3={from: relay, to: main, carries: kv, transport: {plugin: tcp}, link: wan}"
BOUNDS = f"{{min_relay_tokens: {RELAYED}, max_relay_tokens: {RELAYED}}}"
ROUTES = {
    "P-MD": ("spec.routing={plugin: never-relay}",),
    **{
        f"P-RLD-MD, {strategy}": (
            "spec.routing={plugin: always-relay}",
            f"spec.handoff={{plugin: {strategy}, config: {BOUNDS}}}",
        )
        for strategy in ("catch-up", "one-shot", "kv-transfer")
    },
}


class PatientStack(Stack):
    """`up` takes as long as servers take to start."""

    command_time = LONG


class Fleet(NamedTuple):
    stack: Stack
    ports: dict[str, int]
    """Pool → port of its server."""
    expected: dict[int, tuple[int, ...]]
    """Length of a prompt → what a plain SGLang server answers."""

    def count(self, pool: str, name: str, **labels: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.ports[pool]}/metrics", timeout=60).raise_for_status().text
        return scrape(text).value(name, **labels)


NAMES = {"python", "device", "batch_limit", "token_budget", "engine_kv_memory", "start_timeout", "health_timeout"}


def sglang() -> dict[str, Any]:
    """An engine on a CPU, as a graph has it."""
    return {"plugin": "sglang", "config": testing.settings().model_dump(mode="json", include={*NAMES, "kv_memory"})}


def sglang_pd() -> dict[str, Any]:
    """The same, of one that moves its KV itself."""
    settings = testing.transfer_settings().model_dump(mode="json", include={*NAMES, "data_plane"})
    return {"plugin": "sglang", "config": settings}


@contextmanager
def fleet(
    directory: Path,
    engines: Mapping[str, dict[str, Any]],
    graph: str = "quickstart-torch",
    more: Sequence[str] = (RELAY_KV,),
) -> Iterator[Fleet]:
    """`engines`: pool → its engine, as a graph has it. `more`: overrides of the graph."""
    model = ModelSpec(source=str(write_tiny_model(directory / "tiny", seed=3)))
    with testing.plain(testing.settings(), model, directory) as url:
        expected = {n: ask_plain(url, prompt) for n, prompt in PROMPTS.items()}
    ports = {pool: free_port() for pool in POOLS}
    overrides = [f"spec.model.source={model.source}", *more]
    for pool, engine in engines.items():
        whole = engine | {"config": engine["config"] | {"port": ports[pool]}}
        overrides.append(f"spec.pools.{pool}.engine={json.dumps(whole)}")
    with PatientStack(graph, directory / "state", *overrides) as stack:
        yield Fleet(stack, ports, expected)


def ask_plain(url: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    parameters = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": parameters}, timeout=LONG)
    return tuple(answer.raise_for_status().json()["output_ids"])


class Answer(NamedTuple):
    ids: tuple[int, ...]
    timeline: dict[str, Any]


async def ask(fleet: Fleet, driver: Driver, prompt: tuple[int, ...], salt: str) -> Answer:
    request = SessionRequest(
        id=new_id("req"), tokens=prompt, max_tokens=TOKENS, sampling=Sampling(temperature=0), salt=salt
    )
    ids = [item.id async for item in driver.run(request) if not isinstance(item, Finish)]
    timeline = fleet.stack.timelines.get(request.id)
    assert timeline is not None
    return Answer(tuple(ids), timeline.body())


def busy(fleet: Fleet, pool: str) -> float:
    """Requests and tokens that the server holds."""
    loads = httpx.get(f"http://127.0.0.1:{fleet.ports[pool]}/v1/loads", timeout=60).raise_for_status().json()["loads"]
    held = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return float(sum(load[name] for load in loads for name in held))


async def back(fleet: Fleet) -> None:
    """Return when a server that was killed has been missed, and is there again."""
    await until(lambda: not _serves(fleet), 120)
    await until(lambda: _serves(fleet), LONG)


def _serves(fleet: Fleet) -> bool:
    return bool(httpx.get(f"{fleet.stack.url}/ready", timeout=60).status_code == 200)


def server_of(port: int) -> int:
    """The process of the server at that port."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sglang.launch_server" in arguments and str(port).encode() in arguments and b"-I" not in arguments:
            return int(place.name)
    raise AssertionError(f"no server at port {port}")
