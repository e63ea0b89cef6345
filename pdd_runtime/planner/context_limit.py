"""How long a sequence may be in a pool, prompt and answer together, and what says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic import PositiveInt, TypeAdapter, ValidationError

from pdd_runtime.errors import PluginError
from pdd_runtime.graph import Graph
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.model_spec import ModelFigures
from pdd_runtime.planner.profile import PoolProfile
from pdd_runtime.plugins import PluginManager

_KEY = "context_length"
_TOKENS: TypeAdapter[int] = TypeAdapter(PositiveInt)


class ContextLimit(NamedTuple):
    """The frontend refuses a request that asks for more, before any worker hears of it."""

    tokens: int
    said: str
    """What says so: a key, and where it stands."""
    pools: tuple[str, ...]
    """Those that take no more."""

    def holds(self, prompt: int, output: int) -> bool:
        """Whether a request of so many tokens is taken that asks for so many more."""
        return prompt + output <= self.tokens

    @property
    def why(self) -> str:
        """For a message about requests that are longer."""
        those = f"pool {self.pools[0]} takes" if len(self.pools) == 1 else f"pools {', '.join(self.pools)} take"
        return f"{those} {self.tokens:,} tokens, prompt and answer together, by {self.said}"

    @property
    def fix(self) -> str:
        return f"raise {_KEY} as far as the model goes, or take a workload of shorter requests"


def context_limit(
    graph: Graph, pool: str, plugins: PluginManager, profile: PoolProfile | None, model: ModelFigures | None
) -> ContextLimit | None:
    """The least of what graph, profile and the model's figures say of a pool; None: nothing says anything. Raises
    `FigureError`."""
    return least(
        ContextLimit(tokens, said, (pool,)) for tokens, said in _said(graph, pool, plugins, profile, model) if tokens
    )


def least(limits: Iterable[ContextLimit | None]) -> ContextLimit | None:
    """What all of some pools take: a route may lead over each of them. None: nothing limits any."""
    there = [limit for limit in limits if limit is not None]
    if not there:
        return None
    tokens = min(limit.tokens for limit in there)
    same = [limit for limit in there if limit.tokens == tokens]
    said = " and ".join(dict.fromkeys(limit.said for limit in same))
    return ContextLimit(tokens, said, tuple(dict.fromkeys(pool for limit in same for pool in limit.pools)))


def _said(
    graph: Graph, pool: str, plugins: PluginManager, profile: PoolProfile | None, model: ModelFigures | None
) -> Iterator[tuple[int | None, str]]:
    engine = graph.spec.pools[pool].engine
    if (own := engine.config.get(_KEY)) is not None:
        try:
            yield _TOKENS.validate_python(own), f"engine.config.{_KEY} in the graph"
        except ValidationError as error:
            where = f"spec.pools.{pool}.engine.config.{_KEY}"
            raise FigureError(f"{own!r} is no number of tokens", where=where, why=error.errors()[0]["msg"]) from None
    else:
        yield _default(engine.plugin, plugins), f"engine.config.{_KEY}, which has that default"
    if profile is not None:
        yield profile.context_length, f"{_KEY} in the profile"
    if model is not None:
        yield model.context_length, f"{_KEY} of model {graph.model_of(pool).source}"


def _default(engine: str, plugins: PluginManager) -> int | None:
    """None: it has none, or is not installed; who plans need not have the engines."""
    try:
        field = plugins.engine(engine).Config.model_fields.get(_KEY)
    except PluginError:
        return None
    default = field.default if field is not None else None
    return default if isinstance(default, int) else None
