"""All that a plan's trials need, read once in each process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pdd_runtime.errors import PddError
from pdd_runtime.graph import LoadedGraph, load, nearest
from pdd_runtime.graph.document import Document
from pdd_runtime.graph.models import Slo
from pdd_runtime.planner import Workload, read_workload
from pdd_runtime.planner.cost import PriceError
from pdd_runtime.planner.plan_spec import Plan, PlanError, read_plan
from pdd_runtime.planner.pool_model import PoolModel, pool_models
from pdd_runtime.planner.profile import PoolProfile, Profile, ProfileError, read_profile
from pdd_runtime.planner.search.bounds import Bounds
from pdd_runtime.planner.search.demand import Demand
from pdd_runtime.planner.search.family import AS_GIVEN, Family, as_given, families
from pdd_runtime.planner.search.hits import FewerHits
from pdd_runtime.planner.search.trial import Trial, Verdict
from pdd_runtime.planner.simulate import Outcome, Scenario, Simulated, simulate
from pdd_runtime.plugins import PluginManager, load_plugins

PACE = 0.05
"""Seconds a token where nothing is promised."""
NEVER = 1e6
"""Seconds after which who was refused gets a first token: among the P90 they are late."""


@dataclass(frozen=True)
class Setting:
    """A plan with its graph, workload and models."""

    plan: Plan
    document: Document
    loaded: LoadedGraph
    workload: Workload
    families: tuple[Family, ...]
    """Those to choose from, and behind them the graph as it is, where it is known how fast that is."""
    choices: int
    """How many there are to choose from."""
    plugins: PluginManager
    profile: Profile | None

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = ()) -> Setting:
        """Raises `PlanError`, and what graph, workload and models raise."""
        plan, document = read_plan(path, overrides)
        beside = Path(path).parent
        loaded = load(_beside(beside, plan.spec.graph), plan.spec.set)
        workload = read_workload(_beside(beside, plan.spec.workload))
        profile = read_profile(beside / plan.spec.profile) if plan.spec.profile is not None else None
        chosen = families(plan, loaded, document)
        setting = Setting(plan, document, loaded, workload, chosen, len(chosen), load_plugins(), profile)
        return setting._modelled((*chosen, as_given(len(chosen), loaded)))

    def _modelled(self, some: Sequence[Family]) -> Setting:
        """With those of them of which it is known how fast they are: on few chips a model may not fit. Raises the first
        reason where none is left to choose from."""
        kept, reasons = list[Family](), list[PddError]()
        for family in some:
            try:
                self._models(family)
            except PddError as error:
                reasons.append(error)
            else:
                kept.append(replace(family, number=len(kept)))
        choices = sum(family.kinds is not AS_GIVEN for family in kept)
        if not choices:
            raise reasons[0]
        return replace(self, families=tuple(kept), choices=choices)

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
        spec = self.plan.spec
        return pool_models(
            family.smallest,
            self.plugins,
            self._profile(family),
            hardware=spec.hardware,
            models=spec.models,
            settings=spec.latency,
        )

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
            Bounds.of(family, self.demand, models, self.slo.tpot_p90)
            for family, models in zip(self.families, self.models, strict=True)
        )

    def check_prices(self) -> None:
        """Raises `PriceError` where something that may be chosen has no price."""
        for family in self.families[: self.choices]:
            try:
                family.cost(tuple(counts[0] for counts in family.choices.values()), self.plan.spec.prices)
            except PriceError as error:
                where = self.document.locate(("spec", "prices", "nodes")) if "prices" in error.where else error.where
                raise PriceError(error.what, where=where, why=error.why, fix=error.fix) from error

    def simulated(self, trial: Trial, observe: Callable[[Outcome], None] | None = None) -> Simulated:
        """The trial's simulation itself."""
        family = self.families[trial.family]
        graph = family.graph(trial.sizes)
        workload = self.workload.model_copy(update={"rate": trial.rate, "concurrency": None})
        links = {}
        for name, choice in self.plan.spec.links.items():
            if name in graph.spec.links and choice.flow_rate is not None:
                plain = Scenario(graph, self.models[trial.family], self.plugins).link_model(name)
                links[name] = replace(plain, flow_rate=choice.flow_rate / 8)
        for change in trial.changes:
            if change.link:
                plain = Scenario(graph, self.models[trial.family], self.plugins, links).link_model(change.link)
                links[change.link] = replace(plain, bandwidth=plain.bandwidth * change.times)
            else:
                workload = FewerHits.of(workload, change.times)
        scenario = Scenario(graph, self.models[trial.family], self.plugins, links)
        warmup = round(trial.rate * self.filling)
        return simulate(scenario, workload, requests=trial.requests, seed=trial.seed, warmup=warmup, observe=observe)

    def verdict(self, trial: Trial) -> Verdict:
        """Whether the promise is kept."""
        times = Times(self.plan.spec.slo.decoded)
        found = self.simulated(trial, times)
        ttft, tpot = _shown(times.ttft, times.refused), _shown(times.tpot)
        promised = (("ttft", ttft, self.slo.ttft_p90), ("tpot", tpot, self.slo.tpot_p90))
        margins = {name: seen["p90"] / most for name, seen, most in promised if most and seen}
        missed = [name for name, margin in margins.items() if margin > 1] if times.ttft else ["ttft"]
        sent = {name: size / max(1, found.answered) * trial.rate for name, size in found.link_bytes.items()}
        family = self.families[trial.family]
        rates = {name: link.bandwidth / 8 for name, link in family.smallest.spec.links.items()}
        rates |= {change.link: rates[change.link] * change.times for change in trial.changes if change.link}
        slots = {name: model.batch_limit for name, model in self.models[trial.family].items()}
        return Verdict(
            kept=not missed,
            ttft=ttft,
            tpot=tpot,
            missed=tuple(missed),
            busy={use.pool: min(1.0, use.requests / slots[use.pool]) for use in found.pools}
            | {name: each / rates[name] for name, each in sent.items()},
            relay_share=found.relay_share,
            hits=dict(found.hit_rates),
            sent=sent,
            margin=max(margins.values(), default=0.0),
        )


def _on(said: PoolProfile, hardware: str) -> PoolProfile:
    """The same workers on other chips, where their latency model knows what chips are."""
    if "hardware" not in said.latency.config:
        return said
    latency = said.latency.model_copy(update={"config": {**said.latency.config, "hardware": hardware}})
    return said.model_copy(update={"latency": latency})


def _shown(seconds: Sequence[float], refused: int = 0) -> dict[str, float]:
    """Empty where nobody has any. Those who were refused count in P90, which is promised."""
    if not seconds:
        return {}
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    p90 = float(np.quantile([*seconds, *[NEVER] * refused], 0.9, method="inverted_cdf"))
    return {"mean": statistics.fmean(seconds), "p50": p50, "p90": p90, "p99": p99}


class Times:
    """Of single requests, as the promise counts them."""

    def __init__(self, decoded: bool) -> None:
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.refused = 0
        self._decoded = decoded

    def __call__(self, outcome: Outcome) -> None:
        first, behind = outcome.ttft, outcome.output - 1
        if self._decoded and outcome.tt2 is not None:
            first, behind = outcome.tt2, outcome.output - 2
        if first is None:
            self.refused += 1
        else:
            self.ttft.append(first)
        if first is not None and outcome.e2e is not None and behind > 0:
            self.tpot.append((outcome.e2e - first) / behind)


def _beside(directory: Path, name: str) -> str:
    """A file beside the plan, where there is one of that name; else the name, for presets and short texts."""
    there = directory / Path(name).expanduser()
    return str(there) if there.exists() else name


def judge(path: str, overrides: Sequence[str]) -> Callable[[Trial], Verdict]:
    """For each process of the search: what does its trials."""
    return Setting.read(path, overrides).verdict
