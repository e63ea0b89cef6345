"""All that a plan's trials need, read once in each process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pdd_runtime.graph import LoadedGraph, load, nearest
from pdd_runtime.graph.document import Document
from pdd_runtime.graph.models import Slo
from pdd_runtime.planner import Workload, read_workload
from pdd_runtime.planner.plan_spec import Plan, PlanError, read_plan
from pdd_runtime.planner.pool_model import PoolModel, pool_models
from pdd_runtime.planner.profile import PoolProfile, Profile, ProfileError, read_profile
from pdd_runtime.planner.search.bounds import Bounds
from pdd_runtime.planner.search.demand import Demand
from pdd_runtime.planner.search.family import Family, families
from pdd_runtime.planner.search.hits import FewerHits
from pdd_runtime.planner.search.trial import Trial, Verdict
from pdd_runtime.planner.simulate import Scenario, Simulated, simulate
from pdd_runtime.plugins import PluginManager, load_plugins

REFUSED = 0.001
"""A deployment that refuses more than this share of requests does not serve their rate."""


@dataclass(frozen=True)
class Setting:
    """A plan with its graph, workload and models."""

    plan: Plan
    document: Document
    loaded: LoadedGraph
    workload: Workload
    families: tuple[Family, ...]
    plugins: PluginManager
    profile: Profile | None

    @staticmethod
    def read(path: str | Path) -> Setting:
        """Raises `PlanError`, and what graph, workload and models raise."""
        plan, document = read_plan(path)
        beside = Path(path).parent
        loaded = load(_beside(beside, plan.spec.graph), plan.spec.set)
        workload = read_workload(_beside(beside, plan.spec.workload))
        profile = read_profile(beside / plan.spec.profile) if plan.spec.profile is not None else None
        return Setting(plan, document, loaded, workload, families(plan, loaded, document), load_plugins(), profile)

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
        """Of each family. Raises `PddError` where hardware or model are not known."""
        spec = self.plan.spec
        return tuple(
            pool_models(
                family.smallest,
                self.plugins,
                self._profile(family),
                hardware=spec.hardware,
                models=spec.models,
                settings=spec.latency,
            )
            for family in self.families
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
    def bounds(self) -> tuple[Bounds, ...]:
        return tuple(
            Bounds.of(family, self.demand, models, self.slo.tpot_p90)
            for family, models in zip(self.families, self.models, strict=True)
        )

    def simulated(self, trial: Trial) -> Simulated:
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
        return simulate(scenario, workload, requests=trial.requests, seed=trial.seed)

    def verdict(self, trial: Trial) -> Verdict:
        """Whether the promise is kept."""
        found = self.simulated(trial)
        missed = []
        for name, metric, most in (("ttft", found.ttft, self.slo.ttft_p90), ("tpot", found.tpot, self.slo.tpot_p90)):
            if most is not None and (metric.p90 or 0.0) > most:
                missed.append(name)
        if found.rejected + found.failed > REFUSED * found.requests or not found.answered:
            missed.append("load")
        seconds = max(1e-9, found.duration)
        return Verdict(
            kept=not missed,
            ttft={name: _number(value) for name, value in found.ttft.to_json().items()},
            tpot={name: _number(value) for name, value in found.tpot.to_json().items()},
            missed=tuple(missed),
            busy={use.pool: use.utilisation for use in found.pools} | {use.link: use.busy for use in found.links},
            relay_share=found.relay_share,
            hits=dict(found.hit_rates),
            sent={name: size / seconds for name, size in found.link_bytes.items()},
        )


def _on(said: PoolProfile, hardware: str) -> PoolProfile:
    """The same workers on other chips, where their latency model knows what chips are."""
    if "hardware" not in said.latency.config:
        return said
    latency = said.latency.model_copy(update={"config": {**said.latency.config, "hardware": hardware}})
    return said.model_copy(update={"latency": latency})


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _beside(directory: Path, name: str) -> str:
    """A file beside the plan, where there is one of that name; else the name, for presets and short texts."""
    there = directory / Path(name).expanduser()
    return str(there) if there.exists() else name


def judge(path: str) -> Callable[[Trial], Verdict]:
    """For each process of the search: what does its trials."""
    return Setting.read(path).verdict
