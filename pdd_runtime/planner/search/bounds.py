"""What a deployment cannot exceed, whatever its queues do: compute, memory, links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.search.demand import Demand, decode_rate
from pdd_runtime.planner.search.family import Family, Sizes


@dataclass(frozen=True)
class Bounds:
    """Of one family. Rates are requests/s."""

    family: Family
    prefill: Mapping[str, float]
    """What one worker of each pool that reads prompts can read."""
    decode: Mapping[str, float]
    """What one worker of each pool that makes answers can answer; relays, which take a part, among them."""
    link: float
    """What all links from prefill to main carry together; infinite without one."""

    @staticmethod
    def of(family: Family, demand: Demand, models: Mapping[str, PoolModel], tpot: float | None) -> Bounds:
        spec = family.smallest.spec
        prefill: dict[str, float] = {}
        decode: dict[str, float] = {}
        for name in family.pools:
            role, model = spec.pools[name].role, models[name]
            if role in ("prefill", "aggregated"):
                prefill[name] = 1.0 / max(1e-9, demand.prefill(model))
            if role != "prefill":
                decode[name] = decode_rate(model, demand.context, tpot) / demand.output
        crossing = [edge for edge in spec.edges if edge.carries == "kv" and spec.pools[edge.target].role == "main"]
        link = 0.0
        for edge in crossing:
            size = demand.bytes(models[edge.source])
            if edge.link is None or not size:
                link = float("inf")
        links = {edge.link: demand.bytes(models[edge.source]) for edge in crossing if edge.link is not None}
        link += sum(spec.links[name].bandwidth / 8 / size for name, size in links.items() if size)
        return Bounds(family, prefill, decode, link if crossing else float("inf"))

    def rate(self, sizes: Sizes) -> float:
        """More than so many requests/s cannot be served."""
        return min(rate for _, rate in self.rates(sizes))

    def rates(self, sizes: Sizes) -> Iterator[tuple[str, float]]:
        """By what bounds them: `prefill`, `decode`, `link`."""
        count = dict(zip(self.family.pools, sizes, strict=True))
        yield "prefill", sum(count[name] * each for name, each in self.prefill.items())
        yield "decode", sum(count[name] * each for name, each in self.decode.items())
        yield "link", self.link

    def least(self, rate: float, fill: float) -> Sizes | None:
        """Workers that could serve `rate` were they busy for `fill` (0 to 1) of the time: the fewest of each pool where
        its kind had to do it beside what the other pools of its kind are at most. None: no choice is enough."""
        choices = self.family.choices
        largest = tuple(counts[-1] for counts in choices.values())
        if self.rate(largest) * fill < rate:
            return None
        sizes = []
        for name, counts in choices.items():
            need = 0.0
            for each in (self.prefill, self.decode):
                if name in each:
                    others = sum(choices[other][-1] * one for other, one in each.items() if other != name)
                    need = max(need, (rate / fill - others) / each[name] if each[name] else 0.0)
            sizes.append(next((count for count in counts if count >= need - 1e-9), counts[-1]))
        return tuple(sizes)

    def used(self, sizes: Sizes, rate: float) -> dict[str, float]:
        """Of each pool, the share of what it and others that do the same can do; a relay does what it takes on, and
        counts as idle."""
        spec, count = self.family.smallest.spec, dict(zip(self.family.pools, sizes, strict=True))
        used = dict.fromkeys(self.family.pools, 0.0)
        for each in (
            self.prefill,
            {name: one for name, one in self.decode.items() if spec.pools[name].role != "relay"},
        ):
            whole = sum(count[name] * one for name, one in each.items())
            for name in each:
                used[name] = max(used[name], rate / whole if whole else 1.0)
        return used
