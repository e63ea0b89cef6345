"""What tokens earn: cached input is billed at a part of uncached, so earnings turn with the hit rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.prices import Range, Tariff

_MILLION = 1e6


def request_revenue(tariff: Tariff, new: float, cached: float, output: float) -> Range:
    """Of one request with so many tokens, in the tariff's unit."""
    billed = (new + tariff.cached * cached) / _MILLION
    return tariff.input.times(billed).plus(tariff.output.times(output / _MILLION))


@dataclass(frozen=True)
class Earned:
    """By one worker that reads prompts of one hit rate all the time."""

    hit: float
    """Share of the prompt that is cached, 0 to 1."""
    seconds: float
    """Of the worker, for one request."""
    tail: int
    """Tokens of the last pass: a small one takes nearly as long as a whole one."""
    per_token: Range
    """For a million prompt tokens, cached ones among them: it only falls as the hit rate rises."""
    per_hour: Range
    """For the worker's time: the bathtub. It is low where many tokens are new but none is cheap yet, and rises where
    nearly all are cached."""


def bathtub(pool: PoolModel, tariff: Tariff, prompt: int, hits: Sequence[float]) -> tuple[Earned, ...]:
    """What prompts of `prompt` tokens earn at each hit rate. A new token behind a long cached context costs more
    attention than at the beginning, and is billed alike: so revenue an hour falls at first. Then cached tokens, which
    cost the worker nothing and are billed at a part, outweigh that. Where new tokens are a little more than a whole
    number of chunks, the last pass is small and dear: dips."""
    earned = []
    for hit in hits:
        cached = min(round(prompt * hit), prompt - 1)
        new = prompt - cached
        seconds = pool.overhead + prefill_time(pool, new, cached)
        revenue = request_revenue(tariff, new, cached, 0)
        earned.append(
            Earned(
                hit,
                seconds,
                (new - 1) % pool.chunk + 1,
                revenue.times(_MILLION / prompt),
                revenue.times(3600 / seconds),
            )
        )
    return tuple(earned)


def prefill_time(pool: PoolModel, new: int, context: int) -> float:
    """Seconds of `new` prompt tokens behind `context` cached ones, alone on a worker: chunk by chunk, the last one as
    small as it happens to be."""
    time, done = 0.0, 0
    while done < new:
        step = min(pool.chunk, new - done)
        time += pool.latency.prefill(step, context + done)
        done += step
    return time
