"""All that a plan's trials need, read once in each process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pdd_runtime.errors import PddError
from pdd_runtime.graph import Graph, LoadedGraph, load, nearest
from pdd_runtime.graph.document import Document
from pdd_runtime.graph.models import Slo
from pdd_runtime.planner import Workload, read_workload
from pdd_runtime.planner.context_limit import ContextLimit, least
from pdd_runtime.planner.cost import Cost, PriceError
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.plan_spec import Plan, PlanError, read_plan
from pdd_runtime.planner.pool_model import PoolModel, pool_models
from pdd_runtime.planner.profile import PoolProfile, Profile, ProfileError, read_profile
from pdd_runtime.planner.search.bounds import Bounds
from pdd_runtime.planner.search.busy import busy_links, busy_pools
from pdd_runtime.planner.search.demand import Demand
from pdd_runtime.planner.search.family import (
    Family,
    as_given,
    check_policies,
    families,
    relays,
    with_relays,
    without_relays,
)
from pdd_runtime.planner.search.hits import FewerHits
from pdd_runtime.planner.search.named import named, placed
from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.times import Times, percentiles
from pdd_runtime.planner.search.trial import Trial, Verdict
from pdd_runtime.planner.simulate import LinkModel, Outcome, Scenario, Simulated, simulate
from pdd_runtime.plugins import PluginManager, load_plugins

PACE = 0.05
"""Seconds a token where nothing is promised."""
LATE = 0.1
"""Share of requests that may be late: what is promised are P90s."""


@dataclass(frozen=True)
class Setting:
    """A plan with its graph, workload and models."""

    plan: Plan
    document: Document
    loaded: LoadedGraph
    workload: Workload
    families: tuple[Family, ...]
    """Those to choose from; behind them those that are only compared with them, and last the graph as it is, where it
    is known how fast that is."""
    choices: int
    """How many there are to choose from."""
    compared: int
    """How many are only compared: all without a relay where every choice has one, or all with one where none has."""
    lacking: str
    """Why there are none of these although a relay could be told of by them; empty: there are, or need not be."""
    left_out: tuple[str, ...]
    """Why some choices are not among the families: of them it is not known how fast they are."""
    plugins: PluginManager
    profile: Profile | None

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = ()) -> Setting:
        """Raises `PlanError`, and what graph, workload and models raise."""
        plan, document = read_plan(path, overrides)
        spec, beside = plan.spec, Path(path).parent
        loaded = named(document, "graph", spec.graph, lambda: load(placed(beside, spec.graph), spec.set))
        workload = named(document, "workload", spec.workload, lambda: read_workload(placed(beside, spec.workload)))
        profile = None
        if (name := spec.profile) is not None:
            profile = named(document, "profile", name, lambda: read_profile(beside / name))
        plugins = load_plugins()
        check_policies(plan, document, plugins)
        chosen = families(plan, loaded, document)
        setting = Setting(plan, document, loaded, workload, chosen, len(chosen), 0, "", (), plugins, profile)
        return setting._modelled()._with_compared()

    def _modelled(self) -> Setting:
        """With those to choose from of which it is known how fast they are: on few chips a model may not fit. Raises
        the first reason where none is left, and adds the graph as it is where that is known."""
        kept, reasons = self._known(self.families)
        if not kept:
            raise reasons[0]
        given, _ = self._known((as_given(0, self.loaded),))
        left_out = tuple(dict.fromkeys(f"{reason.what}, {reason.why}".rstrip(", ") for reason in reasons))
        return replace(self, families=_numbered((*kept, *given)), choices=len(kept), left_out=left_out)

    def _known(self, some: Sequence[Family]) -> tuple[tuple[Family, ...], list[PddError]]:
        """Of some families those whose times are known, and why others' are not."""
        kept, reasons = list[Family](), list[PddError]()
        for family in some:
            try:
                self._check_lengths(self._models(family))
            except PddError as error:
                reasons.append(error)
            else:
                kept.append(family)
        return tuple(kept), reasons

    def _check_lengths(self, models: Mapping[str, PoolModel]) -> None:
        """Raises `PlanError` where more requests are too long than may be late."""
        limit = _context(models)
        share = self.demand.within(limit).too_long
        if limit is not None and share > LATE:
            raise PlanError(
                f"{share:.2%} of the requests are longer than the context",
                where=self.document.locate(("spec", "workload")),
                why=f"{limit.why}; who is refused is late, and of the P90s that are promised {LATE:.0%} may be",
                fix=limit.fix,
            )

    def too_long(self, family: int) -> PlanError | None:
        """What any deployment of that family refuses, as a warning; None: nothing."""
        limit = _context(self.models[family])
        share = self.demand.within(limit).too_long
        if limit is None or not share:
            return None
        return PlanError(
            f"{share:.2%} of the requests are longer than the context: they are refused, and count as late",
            where=self.document.locate(("spec", "workload")),
            why=limit.why,
            fix=limit.fix,
        )

    def _with_compared(self) -> Setting:
        """With families without a relay where all choices have one, and with one where none has: so that it can be told
        whether a relay pays."""
        having = {bool(relays(family.smallest)) for family in self.families[: self.choices]}
        if len(having) == 2:
            return self
        if not relays(self.loaded.graph):
            return replace(self, lacking="the graph has no pool of role relay")
        try:
            make = without_relays if True in having else with_relays
            some, reasons = self._known(make(self.plan, self.loaded, self.document))
            if not some:
                raise reasons[0]
            for family in some:
                self._price(family)
        except PddError as error:
            kind = "without a relay" if True in having else "with one"
            return replace(self, lacking=f"{kind} nothing can be simulated: {error.what}, {error.why}".rstrip(", "))
        chosen, given = self.families[: self.choices], self.families[self.choices :]
        return replace(self, families=_numbered((*chosen, *some, *given)), compared=len(some))

    def relayed(self, family: int) -> bool:
        """Whether that one has a relay."""
        return bool(relays(self.families[family].smallest))

    @cached_property
    def slo(self) -> Slo:
        """The plan's promise, where it says nothing the graph's. Raises `PlanError` where neither says anything."""
        own, graph = self.plan.spec.slo, self.loaded.graph.spec.slo
        ttft, tpot = own.ttft_p90 or graph.ttft_p90, own.tpot_p90 or graph.tpot_p90
        if ttft is None:
            raise PlanError(
                "nothing says how long users may wait for the first token",
                where=self.document.locate(("spec",)),
                why="without a promise any deployment serves any rate, late",
                fix="add e.g. slo: {ttft_p90: 2s, tpot_p90: 50ms}",
            )
        return graph.model_copy(update={"ttft_p90": ttft, "tpot_p90": tpot})

    @cached_property
    def models(self) -> tuple[Mapping[str, PoolModel], ...]:
        """Of each family."""
        return tuple(map(self._models, self.families))

    def _models(self, family: Family) -> Mapping[str, PoolModel]:
        """Raises `PddError` where hardware or model are not known, or do not fit."""
        spec, profile = self.plan.spec, self._profile(family)
        figures: dict[str, Any] = {"hardware": spec.hardware, "models": spec.models, "settings": spec.latency}
        try:
            return pool_models(family.smallest, self.plugins, profile, **figures)
        except FigureError as error:
            pool = error.where.removeprefix("pool ")
            if pool not in family.kinds:
                raise
            where = self.document.locate(("spec", "pools", pool, "hardware"))
            raise FigureError(f"pool {pool}: {error.what}", where=where, why=error.why, fix=error.fix) from error

    def _profile(self, family: Family) -> Profile | None:
        """What was measured, for the pools as this family has them."""
        if self.profile is None:
            return None
        pools = dict(self.profile.pools)
        for name, kind in family.kinds.items():
            said = pools.get(kind.profile or name)
            if kind.profile is not None and said is None:
                raise ProfileError(
                    f'the profile has no pool "{kind.profile}"',
                    where=self.document.locate(("spec", "pools", name, "hardware")),
                    why=f"it has {', '.join(pools)}",
                    fix=nearest(kind.profile, pools),
                )
            if said is not None:
                pools[name] = said if kind.profile else _on(said, kind.hardware)
        return self.profile.model_copy(update={"pools": pools})

    @cached_property
    def demand(self) -> Demand:
        return Demand.of(self.workload)

    @cached_property
    def filling(self) -> float:
        """Seconds until batches are as full as they get: what nine answers of ten take at the promised pace."""
        outputs = sorted(turn.output for turn in self.demand.turns)
        return outputs[len(outputs) * 9 // 10] * (self.slo.tpot_p90 or PACE)

    @cached_property
    def bounds(self) -> tuple[Bounds, ...]:
        return tuple(
            Bounds.of(family, self.demand.within(_context(models)), models, self.slo.tpot_p90)
            for family, models in zip(self.families, self.models, strict=True)
        )

    def check_prices(self) -> None:
        """Raises `PriceError` where something that may be chosen has no price."""
        for family in self.families[: self.choices]:
            try:
                self._price(family)
            except PriceError as error:
                where = self.document.locate(("spec", "prices", "nodes")) if "prices" in error.where else error.where
                raise PriceError(error.what, where=where, why=error.why, fix=error.fix) from error

    def _price(self, family: Family) -> None:
        family.cost(tuple(counts[0] for counts in family.choices.values()), self.plan.spec.prices)

    def priced(self, candidate: Candidate, verdict: Verdict) -> Cost:
        """An hour of it, with what it sent."""
        sent = {link: each * 3600 for link, each in verdict.sent.items()}
        return self.families[candidate.family].cost(candidate.sizes, self.plan.spec.prices, sent)

    def simulated(self, trial: Trial, observe: Callable[[Outcome], None] | None = None) -> Simulated:
        """The trial's simulation itself."""
        family = self.families[trial.family]
        graph = family.graph(trial.sizes)
        workload = self.workload.model_copy(update={"rate": trial.rate, "concurrency": None})
        links = dict[str, LinkModel]()
        for name, choice in self.plan.spec.links.items():
            if name in graph.spec.links and choice.flow_rate is not None:
                plain = self._scenario(trial, graph, links).link_model(name)
                links[name] = replace(plain, flow_rate=choice.flow_rate / 8)
        for change in trial.changes:
            if change.link:
                plain = self._scenario(trial, graph, links).link_model(change.link)
                links[change.link] = replace(plain, bandwidth=plain.bandwidth * change.times)
            else:
                workload = FewerHits.of(workload, change.times)
        scenario = self._scenario(trial, graph, links)
        warmup = round(trial.rate * self.filling)
        return simulate(scenario, workload, requests=trial.requests, seed=trial.seed, warmup=warmup, observe=observe)

    def _scenario(self, trial: Trial, graph: Graph, links: Mapping[str, LinkModel]) -> Scenario:
        local_rate = self.plan.spec.local_rate / 8
        return Scenario(graph, self.models[trial.family], self.plugins, links, local_rate=local_rate)

    def verdict(self, trial: Trial) -> Verdict:
        """Whether the promise is kept."""
        times = Times(self.plan.spec.slo.decoded)
        found = self.simulated(trial, times)
        ttft, tpot = percentiles(times.ttft, times.refused), percentiles(times.tpot)
        promised = (("ttft", ttft, self.slo.ttft_p90), ("tpot", tpot, self.slo.tpot_p90))
        margins = {name: seen["p90"] / most for name, seen, most in promised if most and seen}
        missed = [name for name, margin in margins.items() if margin > 1] if times.ttft else ["ttft"]
        sent = {name: size / max(1, found.answered) * trial.rate for name, size in found.link_bytes.items()}
        family = self.families[trial.family]
        rates = {name: link.bandwidth / 8 for name, link in family.smallest.spec.links.items()}
        rates |= {change.link: rates[change.link] * change.times for change in trial.changes if change.link}
        pools = busy_pools(
            self.bounds[trial.family],
            trial.sizes,
            self.models[trial.family],
            trial.rate,
            times.reads,
            found.relay_share,
        )
        return Verdict(
            kept=not missed,
            ttft=ttft,
            tpot=tpot,
            missed=tuple(missed),
            busy=pools | busy_links(found, rates),
            relay_share=found.relay_share,
            hits=dict(found.hit_rates),
            sent=sent,
            margin=max(margins.values(), default=0.0),
        )


def _context(models: Mapping[str, PoolModel]) -> ContextLimit | None:
    """The longest request that is served over these pools."""
    return least(model.context for model in models.values())


def _numbered(some: Sequence[Family]) -> tuple[Family, ...]:
    return tuple(replace(family, number=number) for number, family in enumerate(some))


def _on(said: PoolProfile, hardware: str) -> PoolProfile:
    """The same workers on other chips, where their latency model knows what chips are."""
    if "hardware" not in said.latency.config:
        return said
    latency = said.latency.model_copy(update={"config": {**said.latency.config, "hardware": hardware}})
    return said.model_copy(update={"latency": latency})


def judge(path: str, overrides: Sequence[str]) -> Callable[[Trial], Verdict]:
    """For each process of the search: what does its trials."""
    return Setting.read(path, overrides).verdict
