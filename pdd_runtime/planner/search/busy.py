"""How busy pools and links are at a rate, whatever a run's beginning and end are like.

By work, not by time: what a simulated request took on average, times the rate, of what there is. A run's own times have
its end in them, when nobody sends any more and pools run dry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.revenue import prefill_time
from pdd_runtime.planner.search.bounds import Bounds
from pdd_runtime.planner.search.family import Sizes
from pdd_runtime.planner.simulate import Simulated

Read = tuple[int, int]
"""Tokens of a prompt that had to be computed, and those that were cached."""


def busy_pools(
    bounds: Bounds,
    sizes: Sizes,
    models: Mapping[str, PoolModel],
    rate: float,
    reads: Sequence[Read],
    relay_share: float,
) -> dict[str, float]:
    """By pool, 0 to 1: of workers that read prompts the time in which they do, prompt by prompt; of those that decode
    the tokens that they make, of what slots, memory and the promised pace allow. `relay_share`: of all tokens."""
    count = dict(zip(bounds.family.pools, sizes, strict=True))
    pools = bounds.family.smallest.spec.pools
    times = {name: _mean(models[name], reads) for name in bounds.prefill}
    reading = sum(count[name] / time for name, time in times.items() if time)
    busy = dict.fromkeys(times, min(1.0, rate / reading) if reading else 0.0)
    for relays, share in ((True, relay_share), (False, 1 - relay_share)):
        some = [name for name in bounds.decode if (pools[name].role == "relay") is relays]
        made = sum(count[name] * bounds.decode[name] for name in some)
        for name in some:
            busy[name] = max(busy.get(name, 0.0), min(1.0, share * rate / made) if made else 1.0)
    return busy


def busy_links(found: Simulated, bandwidth: Mapping[str, float]) -> dict[str, float]:
    """By link, 0 to 1, of its fuller direction. `bandwidth`: bytes/s."""
    busy = dict.fromkeys(bandwidth, 0.0)
    for use in found.links:
        sent = use.bytes / max(1, found.answered) * found.offered_rate
        busy[use.link] = max(busy[use.link], min(1.0, sent / bandwidth[use.link]))
    return busy


def _mean(model: PoolModel, reads: Sequence[Read]) -> float:
    return sum(prefill_time(model, new, cached) for new, cached in reads) / max(1, len(reads))
