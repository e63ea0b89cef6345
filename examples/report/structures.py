"""The model, and rival ones: what else might explain the report's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models import CHUNK, Affine, Fitted, pools, scenario
from parameters import fitted_line, parameters

from pdd_runtime.planner.simulate import LinkModel, Scenario

Changes = Callable[[str, Fitted], Mapping[str, Any]]
SLOWER = 1.5
"""A token of a whole pass, of 16,384, against one of a smaller pass."""
TOGETHER = 16
"""Prompts of a pass."""
EVERYBODY = 256


def _none(name: str, numbers: Fitted) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Structure:
    """A model. Beside what it says, its parameters are to be found."""

    title: str
    given: Mapping[str, float] = field(default_factory=dict)
    """Parameters that it says."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Where to begin with others, where their meaning is another one."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are the same as others."""
    changes: Changes = _none
    """What it has otherwise, of a deployment's scenario."""

    def complete(self, numbers: Fitted) -> Fitted:
        """With those that follow from others."""
        return replace(numbers, **{name: getattr(numbers, other) for name, other in self.tied.items()})

    def free(self, names: Sequence[str]) -> list[str]:
        """Those of them that are to be found."""
        return [name for name in names if name not in self.given and name not in self.tied]

    def scenario(self, name: str, numbers: Fitted) -> Scenario:
        return scenario(name, numbers, **self.changes(name, numbers))


class SlowOnMisses(Affine):
    """A token of a whole pass takes longer: prompts that lack much are slower than their tokens say."""

    name = "slow-on-misses"

    def prefill(self, new: int, context: int) -> float:
        seconds = super().prefill(new, context)
        return seconds + (SLOWER - 1) * self.config.token_time * new if new == CHUNK else seconds


def _queue(name: str, numbers: Fitted) -> Mapping[str, Any]:
    """A line of `flow_rate`."""
    if name == "idc-pd":
        return {}
    return {"links": {"wan": LinkModel(numbers.flow_rate, parameters()["assumed"]["rtt"], discipline="fifo")}}


def _misses(name: str, numbers: Fitted) -> Mapping[str, Any]:
    models = dict(pools(name, numbers))
    latency = models["prefill"].latency
    assert isinstance(latency, Affine)
    models["prefill"] = replace(models["prefill"], latency=SlowOnMisses(latency.config))
    return {"pools": models}


def _together(name: str, numbers: Fitted) -> Mapping[str, Any]:
    models = dict(pools(name, numbers))
    models["prefill"] = replace(models["prefill"], batch_limit=TOGETHER)
    return {"pools": models}


STRUCTURES: Mapping[str, Structure] = {
    "": Structure("the model"),
    "queue": Structure("transfers wait for the line, one behind the other", start={"flow_rate": 5e8}, changes=_queue),
    "one line": Structure("transfers as fast as the transfer test's", given={"flow_rate": fitted_line().flow_rate}),
    "places": Structure("IDC-PD's batches hold all", given={"slots": EVERYBODY}),
    "misses": Structure(f"a token of a whole pass takes {SLOWER:g} times as long", changes=_misses),
    "together": Structure("prompts share prefill's passes", changes=_together),
    "stops": Structure("main's other answers stop for all of an extend", given={"riding": 1.0}),
    "one step": Structure("the relay's steps are as long as IDC-PD's", tied={"relay": "h100"}),
    "H": Structure("a relay is used below 90 % of a prompt", given={"lacking": 0.1}),
}
