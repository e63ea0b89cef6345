"""What planning one route costs, in microseconds of CPU: finding out what each worker has cached of the prompt, and the
choice among them. Half of the prompt is cached on the first worker of each pool.

    .venv/bin/python bench/route.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pdd_runtime.kv import seed
from pdd_runtime.kv.names import child
from pdd_runtime.pipeline.peers import cached_tokens
from pdd_runtime.pipeline.placement import place
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.engine import Capabilities, EngineInfo
from pdd_runtime.plugins.routing import ClusterView, EdgeView, LinkView, RequestFacts, Role, WorkerKey, WorkerView
from pdd_runtime.testing.scripted_config import ScriptedConfig

LAYOUT = ScriptedConfig().layout
SIZE = LAYOUT.block_size
ROUNDS, REPEATS = 7, 300


class Holder:
    """A worker, as far as finding out what it has cached goes."""

    def __init__(self, key: WorkerKey, role: Role, cluster: str, names: set[bytes]) -> None:
        info = EngineInfo(
            model="m",
            fingerprint="f",
            layout=LAYOUT,
            capacity_blocks=1024,
            context_length=8192,
            batch_limit=16,
            capabilities=Capabilities(),
        )
        self.key, self.names = key, names
        self.member = Member(key=key, role=role, cluster=cluster, state="ready", pid=1, endpoint="h:1", info=info)


def view_of(workers: list[Holder], cached: dict[WorkerKey, int], edges: tuple[EdgeView, ...]) -> ClusterView:
    views = [
        WorkerView(
            key=each.key,
            role=each.member.role,  # type: ignore[arg-type]
            cluster=each.member.cluster,
            cached_tokens=cached.get(each.key, 0),
            running=each.key.index % 5,
            waiting=0,
            batch_limit=16,
            token_bytes=LAYOUT.token_bytes,
            token_time=1e-4,
            request_time=0.1,
        )
        for each in workers
    ]
    links = tuple(
        LinkView(name=f"a{a}-b{b}", source=f"a{a}", target=f"b{b}", bandwidth=25e6, rtt=0.05)
        for a in (1, 2)
        for b in (1, 2)
    )
    return ClusterView(workers=tuple(views), edges=edges, links=links)


def two_by_two(count: int, names: set[bytes]) -> tuple[list[Holder], tuple[EdgeView, ...]]:
    """`count` workers in six pools, half of them main."""
    each: dict[Role, int] = {"prefill": count // 6, "relay": count // 6, "main": count // 2 - 2 * (count // 6)}
    workers, edges = [], []
    for side in (1, 2):
        for role, replicas in each.items():
            cluster = f"{'b' if role == 'main' else 'a'}{side}"
            for index in range(max(1, replicas)):
                key = WorkerKey(f"{role}{side}", index, "e")
                workers.append(Holder(key, role, cluster, set(names) if not index else {b"other"}))
        edges.append(EdgeView(source=f"prefill{side}", target=f"relay{side}", carries="kv", link=None))
        for main in (1, 2):
            link = f"a{side}-b{main}"
            edges.append(EdgeView(source=f"prefill{side}", target=f"main{main}", carries="kv", link=link))
            edges.append(EdgeView(source=f"relay{side}", target=f"main{main}", carries="tokens", link=link))
    return workers, tuple(edges)


def microseconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(REPEATS):
            work()
        best = min(best, (time.process_time() - begun) / REPEATS)
    return best * 1e6


def main() -> None:
    randomness = random.Random(1)
    print(f"{'workers':>8} {'prompt':>8} {'cached':>8} {'choice':>8}   us")
    for count in (6, 64):
        for tokens in (512, 8192):
            prompt = tuple(randomness.randrange(256) for _ in range(tokens))
            name, names = seed("f", LAYOUT.spec, salt=""), set()
            for start in range(0, tokens // 2, SIZE):
                name = child(name, prompt[start : start + SIZE])
                names.add(name)
            workers, edges = two_by_two(count, names)
            facts = RequestFacts(prompt_tokens=tokens, max_tokens=100, seed=7)
            cached = cached_tokens(workers, prompt, "")  # type: ignore[arg-type]
            view = view_of(workers, cached, edges)
            costs = (
                microseconds(lambda: cached_tokens(workers, prompt, "")),  # type: ignore[arg-type] # noqa: B023
                microseconds(lambda: place(facts, view)),  # noqa: B023
            )
            print(f"{len(workers):>8} {tokens:>8}", *(f"{cost:>8.0f}" for cost in costs))


if __name__ == "__main__":
    main()
