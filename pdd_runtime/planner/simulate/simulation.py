"""Runs a scenario under a workload."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

from pdd_runtime.planner.simulate.outcome import METRICS, Outcome
from pdd_runtime.planner.simulate.recorder import Recorder
from pdd_runtime.planner.simulate.repeated import Repeated
from pdd_runtime.planner.simulate.scenario import Scenario
from pdd_runtime.planner.simulate.simulated import LinkUse, Metric, PoolUse, Simulated
from pdd_runtime.planner.simulate.world import World
from pdd_runtime.planner.workload import Workload, first

WARMUP = 0.1
"""Of the requests, so many more go before those that are measured."""
SAMPLE = 500
"""Sessions by which it is known how long the prefixes are that sessions share."""


def simulate(
    scenario: Scenario,
    workload: Workload,
    *,
    requests: int,
    seed: int = 0,
    warmup: int | float = WARMUP,
    whole_sessions: bool | None = None,
    observe: Callable[[Outcome], None] | None = None,
) -> Simulated:
    """Send `requests` of the workload, and before them `warmup` (a number, or a share of `requests`) that are not
    measured, and run until all measured ones have ended. A trace that is shorter ends sooner.

    Of sessions with several requests those count that come first, so that the load is as steady at the end as before.
    With `whole_sessions`, which is the default where nothing is warmed up, it is the sessions that a bench of so many
    requests sends, each to its end.

    `observe` is called with each measured request as it ends. Raises `SimulationError` for a scenario that lacks
    something, and what policy and strategy raise for the graph."""
    before = warmup if isinstance(warmup, int) else round(warmup * requests)
    recorder = Recorder(before, requests, observe)
    sessions = workload.stream(seed)
    if not before if whole_sessions is None else whole_sessions:
        sessions = first(sessions, before + requests)
    world = World(scenario, recorder, sessions, workload.users, apart=workload.trace is None)
    if scenario.warm:
        _warm(world, workload, seed)
    begun, sent, ended = _Marks(), _Marks(), _Marks()
    recorder.begins = partial(begun.take, world)
    recorder.all_sent = partial(sent.take, world)
    world.open()
    with _rarely_collected():
        world.events.run()
    recorder.flush()
    ended.take(world)
    return _simulated(world, begun, sent, ended)


def _warm(world: World, workload: Workload, seed: int) -> None:
    """Every worker has seen the prefixes that sessions share."""
    seen: dict[int, int] = {}
    for session in islice(workload.stream(seed, "prefixes"), SAMPLE):
        chain, tokens = session.turns[0].spans[0]
        if chain < 0 and tokens > seen.get(chain, 0):
            seen[chain] = tokens
    for worker in world.workers.values():
        for chain, tokens in seen.items():
            worker.cache.take(((chain, tokens),))


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """What a simulation makes, it lets go without cycles: looking for those takes a fifth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Marks:
    """What links and pools had done at some time."""

    def __init__(self) -> None:
        self.at = 0.0
        self.sent: dict[tuple[str, str], float] = {}
        self.busy: dict[tuple[str, str], float] = {}
        self.pools: dict[str, float] = {}

    def take(self, world: World) -> None:
        self.at = world.events.now
        self.sent = {key: link.sent for key, link in world.ways.links.items()}
        self.busy = {key: link.busy for key, link in world.ways.links.items()}
        self.pools = {
            name: pool.busy + sum([worker.owed for worker in pool.workers]) for name, pool in world.pools.items()
        }


def _simulated(world: World, begun: _Marks, sent: _Marks, ended: _Marks) -> Simulated:
    """`begun` and `sent`: when the first and the last of those that are measured were."""
    recorder = world.recorder
    duration = max(0.0, recorder.last - recorder.began)
    # How busy all are while requests come: behind the last one batches and lines run empty.
    until = sent if sent.at > begun.at else ended
    seconds = max(1e-9, until.at - begun.at)
    metrics = {metric: Metric(recorder.histograms[metric]) for metric in METRICS}
    measured = recorder.answered + recorder.rejected + recorder.failed
    sending = recorder.sent_last - recorder.began
    prompts = max(1, recorder.prompt_tokens)
    return Simulated(
        requests=measured,
        answered=recorder.answered,
        rejected=recorder.rejected,
        too_long=recorder.too_long,
        failed=recorder.failed,
        **metrics,
        tokens=dict(recorder.tokens),
        routes=dict(recorder.routes),
        hit_rates={tier: cached / prompts for tier, cached in recorder.cached.items()},
        links=tuple(
            LinkUse(
                link=name,
                source=source,
                bytes=link.sent - begun.sent.get((name, source), 0.0),
                busy=(until.busy[name, source] - begun.busy.get((name, source), 0.0)) / seconds,
                queue=world.looks.queue(name, source),
            )
            for (name, source), link in world.ways.links.items()
        ),
        pools=tuple(
            PoolUse(
                name,
                (until.pools[name] - begun.pools.get(name, 0.0)) / (seconds * len(pool.workers)),
                world.looks.requests(name),
            )
            for name, pool in world.pools.items()
        ),
        duration=duration,
        offered_rate=(measured - 1) / sending if sending > 0 else 0.0,
        achieved_rate=recorder.within / sending
        if recorder.within
        else recorder.answered / duration
        if duration > 0
        else 0.0,
        pairs=recorder.pairs,
    )


def repeat(
    scenario: Scenario,
    workload: Workload,
    *,
    requests: int,
    seeds: Sequence[int],
    warmup: int | float = WARMUP,
) -> Repeated:
    """One run for each seed."""
    return Repeated(tuple(simulate(scenario, workload, requests=requests, seed=seed, warmup=warmup) for seed in seeds))
