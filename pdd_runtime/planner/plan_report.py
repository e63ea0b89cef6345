"""A plan's answer for people and programs: figures, sentences, the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from pdd_runtime.graph.units import write_duration
from pdd_runtime.planner.prices import Range
from pdd_runtime.planner.revenue import Earned, bathtub
from pdd_runtime.planner.search.deployment import Deployment
from pdd_runtime.planner.search.find import Found
from pdd_runtime.planner.search.otherwise import WhatIf
from pdd_runtime.planner.search.relay import Difference
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.times import NEVER
from pdd_runtime.planner.search.worth import SHORT

HITS = tuple(step / 100 for step in range(0, 100))
"""Of the bathtub."""


@dataclass(frozen=True)
class PlanReport:
    """All that `pdd-runtime plan` found."""

    setting: Setting
    found: Found
    what_if: WhatIf | None

    @property
    def unit(self) -> str:
        return self.setting.plan.spec.prices.unit

    @property
    def promise(self) -> str:
        slo = self.setting.slo
        each = "" if slo.tpot_p90 is None else f", P90 of each further one {write_duration(slo.tpot_p90)}"
        return f"P90 of the first token {write_duration(slo.ttft_p90 or 0)}{each}"

    @property
    def sources(self) -> dict[str, str]:
        """Where the times of each pool of the best come from."""
        models = self.setting.models[self.found.best.candidate.family]
        return {name: model.latency.source for name, model in models.items()}

    @property
    def bathtub(self) -> tuple[Earned, ...]:
        """What a worker that reads prompts of the workload's mean length earns at each hit rate."""
        best = self.found.best
        models = self.setting.models[best.candidate.family]
        reads = next(name for name, pool in best.graph.spec.pools.items() if pool.role in ("prefill", "aggregated"))
        tariff = self.setting.plan.spec.prices.tariff
        return bathtub(models[reads], tariff, round(self.setting.demand.prompt), HITS)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What it means."""
        return tuple(self._sentences())

    @property
    def relay_sentence(self) -> str:
        """Whether a relay pays, and what says so."""
        answer, unit = self.found.relay, self.unit
        if answer.verdict == "not known":
            return f"Whether a relay pays cannot be told: {answer.why}."
        compared = {"": "", "without": "one without a relay", "with": "one with a relay"}[answer.compared]
        beside = f" The plan does not allow {compared}: it was simulated for this only." if compared else ""
        if answer.without is None or answer.beside is None:
            lacking = "Without one" if answer.without is None else "With one"
            return f"A relay {answer.verdict}. {lacking}: {answer.why}.{beside}"
        told = {
            "goodput / cost": (answer.bcr, f"requests/s for each {unit}"),
            "goodput": (answer.goodput, "requests/s for the budget"),
            "cost": (answer.cost, f"cost of {self.setting.plan.spec.goodput or 0:g} requests/s"),
        }
        difference, what = told[answer.by]
        assert difference is not None
        by = f"it changes the {what} by {changed(difference)}"
        if answer.why:
            return f"It is not sure whether a relay pays: {by}, but {answer.why}.{beside}"
        if answer.verdict == "no difference shown":
            return f"No difference is shown between the best with and without a relay: {by}.{beside}"
        return f"A relay {answer.verdict}: {by}.{beside}"

    def _sentences(self) -> Iterator[str]:
        yield self.relay_sentence
        if (long := self.setting.too_long(self.found.best.candidate.family)) is not None:
            yield f"{long.what}; {long.why}."
        for reason in self.setting.left_out:
            yield f"Left out: {reason}."
        need, best = self.setting.plan.spec.goodput, self.found.best
        if need is not None and best.goodput < (1 - SHORT) * need:
            yield f"Measured for longer, the best serves {best.goodput:.3g} requests/s, not the {need:g} asked for."
        elif need is not None and best.interval.low < (1 - SHORT) * need:
            served = ranged(best.interval, ".3g")
            yield f"By the seeds the best serves {served} requests/s: to be surer of {need:g}, ask for more."
        if self.what_if is None:
            return
        binding = [each for each in self.what_if.binds if each.binds]
        late = " and ".join(
            {"ttft": "the first token is late", "tpot": "tokens are slow"}[name] for name in self.what_if.missed
        )
        if binding:
            first = binding[0]
            most = "" if self._more_allowed(first.name) else "; the plan allows no more of it"
            yield f"{first.name} binds: more of it brings {first.gain:.0%} more goodput{most}. At a higher rate {late}."
        else:
            yield f"No pool or link binds by itself: it is balanced. At a higher rate {late}."
        falls = self.what_if.falls
        whole = falls[0]
        less = next((fall for fall in falls[1:] if fall.goodput < 0.9 * whole.goodput), None)
        if less is not None:
            yield (
                f"When every request's hit falls to {less.kept:.0%} of what it is, it serves "
                f"{less.goodput:.3g} requests/s; at {whole.goodput:.3g} the P90 of the first token would be: "
                f"{told(less.ttft)}."
            )
        for name in dict.fromkeys(each.what.partition(" ×")[0] for each in self.what_if.priced):
            other = [e for e in self.what_if.priced if e.what.startswith(f"{name} ×") and e.best is not self.found.best]
            if other:
                yield f"With the price of {other[0].what} another is best: {pools(other[0].best)}."

    def _more_allowed(self, name: str) -> bool:
        """Whether the plan lets one have more of a pool or a link than the best has."""
        best = self.found.best
        counts = best.family.choices.get(name)
        if counts is not None:
            return counts[-1] > best.graph.spec.pools[name].replicas
        link = self.setting.plan.spec.links.get(name)
        rates = None if link is None else link.bandwidth
        return rates is not None and max(rates) > best.graph.spec.links[name].bandwidth

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        spec = self.setting.plan.spec
        return {
            "plan": self.setting.plan.metadata.name,
            "unit": self.unit,
            "slo": {"ttft_p90": self.setting.slo.ttft_p90, "tpot_p90": self.setting.slo.tpot_p90},
            "goal": {"goodput": spec.goodput, "budget": spec.budget},
            "deployments": self.found.deployments,
            "left_out": list(self.setting.left_out),
            "trials": self.found.trials,
            "sources": self.sources,
            "best": deployment_json(self.found.best),
            "given": None if self.found.given is None else deployment_json(self.found.given),
            "front": [deployment_json(each) for each in self.found.front],
            "relay": self._relay_json(),
            "what_if": None if self.what_if is None else self._what_if_json(self.what_if),
            "sentences": self.sentences,
            "bathtub": [asdict(each) for each in self.bathtub],
        }

    def _relay_json(self) -> dict[str, Any]:
        answer = self.found.relay
        both = {"without": answer.without, "with": answer.beside}
        differences = {"goodput": answer.goodput, "cost": answer.cost, "bcr": answer.bcr}
        return {
            "verdict": answer.verdict,
            "by": answer.by,
            "why": answer.why,
            "compared_only": answer.compared or None,
            **{name: None if each is None else deployment_json(each) for name, each in both.items()},
            "difference": {
                name: None if each is None else {"middle": each.middle, "ci": list(each.interval)}
                for name, each in differences.items()
            },
            "sentence": self.relay_sentence,
        }

    def _what_if_json(self, what_if: WhatIf) -> dict[str, Any]:
        return {
            "binds": [{**asdict(each), "binds": each.binds} for each in what_if.binds],
            "missed": what_if.missed,
            "others": [asdict(each) for each in what_if.others],
            "falls": [asdict(each) for each in what_if.falls],
            "priced": [
                {"what": each.what, "pools": each.best.pools, "cost": each.cost, "bcr": each.bcr}
                for each in what_if.priced
            ],
        }

    def graph_yaml(self) -> str:
        """The best deployment as a file that `up` takes."""
        best = self.found.best
        head = (
            f"# Found by `pdd-runtime plan`: {best.goodput:.3g} requests/s with a {self.promise},\n"
            f"# for {ranged(best.cost.total)} {self.unit}, by simulation.\n"
        )
        data = best.family.with_sizes(best.candidate.sizes)
        return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def deployment_json(each: Deployment) -> dict[str, Any]:
    cost = each.cost
    return {
        "pools": {
            name: {"replicas": pool.replicas, "hardware": pool.hardware, "cluster": pool.cluster}
            for name, pool in each.graph.spec.pools.items()
        },
        "links": {name: link.bandwidth for name, link in each.graph.spec.links.items()},
        "routing": each.graph.spec.routing.model_dump(mode="json"),
        "handoff": each.graph.spec.handoff.model_dump(mode="json"),
        "traits": dict(each.family.traits),
        "cost": {**{name: list(part) for name, part in vars(cost).items()}, "total": list(cost.total)},
        "goodput": each.goodput,
        "goodput_ci": list(each.interval),
        "goodput_by_seed": dict(each.rates),
        "bcr": list(each.bcr),
        "at_goodput": each.verdict._asdict(),
    }


def pools(each: Deployment) -> str:
    """`10 prefill (32xh100), 1 relay (24xh100), 16 main (16xh200)`."""
    named = each.graph.spec.pools.items()
    return ", ".join(f"{pool.replicas} {name} ({pool.hardware})" for name, pool in named)


def traits(each: Deployment) -> str:
    """What else sets it apart: `no relay, wan 20Gbit/s`."""
    spec = each.graph.spec
    some = (
        f"no {name}" if trait == "none" and name not in (*spec.links, "routing", "handoff") else f"{name} {trait}"
        for name, trait in each.family.traits.items()
        if name not in spec.pools
    )
    return ", ".join(some)


def changed(difference: Difference) -> str:
    """`+3.1% (+1.2% to +5.0%)`, or one number where it is as good as certain."""
    middle, low, high = (f"{part:+.1%}" for part in (difference.middle, *difference.interval))
    return middle if low == high else f"{middle} ({low} to {high})"


def told(seconds: float) -> str:
    """A P90 as `9.8 s`; of whom are refused it is no number."""
    return "too many are refused" if seconds >= NEVER else f"{seconds:.3g} s"


def ranged(value: Range, form: str = ".4g") -> str:
    """`81.8–85`, or one number where both ends are alike."""
    low, high = format(value.low, form), format(value.high, form)
    return low if low == high else f"{low}–{high}"
