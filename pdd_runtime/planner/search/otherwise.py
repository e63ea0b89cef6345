"""What if: the best deployment with another link, another worker, fewer hits, other prices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdd_runtime.planner.hardware import counted
from pdd_runtime.planner.plan_spec import PlanBody
from pdd_runtime.planner.prices import Prices
from pdd_runtime.planner.search.deployment import Deployment
from pdd_runtime.planner.search.find import Finder, Found
from pdd_runtime.planner.search.goodput import goodput
from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.times import NEVER
from pdd_runtime.planner.search.trial import Change, Verdict

LINKS = (0.5, 2.0)
KEPT = (1.0, 0.95, 0.9, 0.8, 0.6, 0.3, 0.0)
"""Shares of every request's hit that are left."""
PRICES = (0.8, 1.25)
BINDS = 0.03
"""Less goodput than this part more is noise."""


@dataclass(frozen=True)
class Otherwise:
    """The best deployment when one thing is different."""

    what: str
    goodput: float
    """Requests/s."""
    change: float
    """Part by which that is more than without; below 0: less."""
    bcr: float
    """At the middle of prices."""


@dataclass(frozen=True)
class Fall:
    """The best deployment when less is cached."""

    kept: float
    """Share of every request's hit that is left."""
    hits: Mapping[str, float]
    """What is cached at prefill and main then, as shares of all prompt tokens."""
    goodput: float
    bcr: float
    relay_share: float
    """Of the answers' tokens, at that goodput."""
    ttft: float
    """P90 in seconds, at the goodput of the whole hit rate: what users would notice."""


@dataclass(frozen=True)
class Priced:
    """Which deployment would be best at another price."""

    what: str
    best: Deployment
    cost: float
    """What it costs then, at the middle of prices."""

    @property
    def bcr(self) -> float:
        return self.best.goodput / self.cost


@dataclass(frozen=True)
class Binds:
    """What limits the best deployment."""

    name: str
    """A pool or a link."""
    used: float
    """Share of it that is used at the goodput, 0 to 1."""
    gain: float
    """Part of goodput that more of it brings: one step of workers, or twice the link."""

    @property
    def binds(self) -> bool:
        return self.gain > BINDS


@dataclass(frozen=True)
class WhatIf:
    """All of it."""

    binds: tuple[Binds, ...]
    """What brings most first."""
    missed: tuple[str, ...]
    """The promises that break first when the rate rises: `ttft`, `tpot`."""
    others: tuple[Otherwise, ...]
    falls: tuple[Fall, ...]
    priced: tuple[Priced, ...]


def what_if(finder: Finder, found: Found) -> WhatIf:
    """By simulation; prices by arithmetic."""
    best, trials = found.best, finder.trials
    links = [name for name, link in best.graph.spec.links.items() if _used(best, name)]
    changes: dict[str, tuple[Candidate, tuple[Change, ...]]] = {
        "": (best.candidate, ()),
        **{f"{name} × {times:g}": (best.candidate, (Change(name, times),)) for name in links for times in LINKS},
        **{f"{pool} {by:+d}": (other, ()) for pool, by, other in _steps(best)},
        **{_fall(kept): (best.candidate, (Change(times=kept),)) for kept in KEPT[1:]},
    }
    # As long as the search's own trials, and all by the same seed: what is compared is the difference, which is then
    # applied to what the best was measured to serve.
    steps = {
        what: goodput(trials, candidate, change, guess=best.goodput) for what, (candidate, change) in changes.items()
    }
    rates = trials.together("asks what if", steps)
    base = rates[""] or best.goodput
    others = []
    for what, rate in rates.items():
        if what and not what.startswith("hits"):
            served = best.goodput * rate / base
            spent = finder.cost(changes[what][0]) - finder.cost(best.candidate) + best.spent(served).middle
            others.append(Otherwise(what, served, rate / base - 1, served / spent))
    above = trials.verdicts("asks what if", [trials.trial(best.candidate, base * 1.05)])[0]
    return WhatIf(
        binds=tuple(sorted(_binds(best, base, rates, links), key=lambda each: -each.gain)),
        missed=above.missed or ("ttft",),
        others=tuple(others),
        falls=tuple(_falls(finder, best, base, rates)),
        priced=tuple(_priced(finder.setting.plan.spec, found)),
    )


def _fall(kept: float) -> str:
    return f"hits × {kept:g}"


def _used(best: Deployment, link: str) -> bool:
    return any(edge.link == link and edge.carries == "kv" for edge in best.graph.spec.edges)


def _steps(best: Deployment) -> Iterator[tuple[str, int, Candidate]]:
    """One worker more and one less of each pool, whatever the plan's choices are."""
    for axis, pool in enumerate(best.family.pools):
        for by in (-1, 1):
            sizes = list(best.candidate.sizes)
            sizes[axis] += by
            if sizes[axis] >= 1:
                yield pool, by, best.candidate._replace(sizes=tuple(sizes))


def _binds(best: Deployment, base: float, rates: Mapping[str, float], links: list[str]) -> Iterator[Binds]:
    busy = best.verdict.busy
    more = {name: f"{name} +1" for name in best.graph.spec.pools} | {name: f"{name} × {LINKS[-1]:g}" for name in links}
    for name, what in more.items():
        yield Binds(name, busy.get(name, 0.0), rates[what] / base - 1)


def _falls(finder: Finder, best: Deployment, base: float, rates: Mapping[str, float]) -> Iterator[Fall]:
    trials = finder.trials
    served = {kept: base if kept == 1.0 else rates[_fall(kept)] for kept in KEPT}

    def at(kept: float, rate: float) -> Verdict:
        changes = () if kept == 1.0 else (Change(times=kept),)
        return trials.verdicts("asks what if", [trials.trial(best.candidate, rate, changes)])[0]

    for kept, rate in served.items():
        own, same = at(kept, rate or base), at(kept, base)
        less = best.goodput * rate / base
        spent = finder.setting.priced(best.candidate, own).total.middle
        yield Fall(kept, own.hits, less, less / spent, own.relay_share, same.ttft.get("p90", NEVER))


def _priced(spec: PlanBody, found: Found) -> Iterator[Priced]:
    """Over the front: others were dearer at these prices, and hardly are cheaper at those."""
    kinds = {hardware for each in found.front for hardware in _hardware(each)}
    for name in [name for name in spec.prices.nodes if name.lower() in kinds] + ["line"]:
        for times in PRICES:
            prices = _changed(spec.prices, name, times)
            costs = {id(each): _cost(each, prices) for each in found.front}

            def worth(each: Deployment, costs: Mapping[int, float] = costs) -> float:
                spent = costs[id(each)]
                if spec.goodput is not None:
                    return -spent if each.goodput >= 0.98 * spec.goodput else float("-inf")
                if spec.budget is not None:
                    return each.goodput if spent <= spec.budget else float("-inf")
                return each.goodput / spent

            best = max(found.front, key=worth)
            yield Priced(f"{name} × {times:g}", best, costs[id(best)])


def _cost(each: Deployment, prices: Prices) -> float:
    sent = {link: rate * 3600 for link, rate in each.verdict.sent.items()}
    return each.family.cost(each.candidate.sizes, prices, sent).total.middle


def _hardware(each: Deployment) -> Iterator[str]:
    for pool in each.graph.spec.pools.values():
        if pool.hardware is not None:
            yield counted(pool.hardware)[1]


def _changed(prices: Prices, name: str, times: float) -> Prices:
    if name == "line":
        line = prices.line.model_copy(update={"price": prices.line.price.times(times)})
        return prices.model_copy(update={"line": line})
    node = prices.nodes[name]
    changed = node.model_copy(update={"price": node.price.times(times)})
    return prices.model_copy(update={"nodes": {**prices.nodes, name: changed}})
