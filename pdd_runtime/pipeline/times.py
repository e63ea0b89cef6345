"""How long things take at workers that have not measured it yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdd_runtime.plugins.routing import WorkerView


def with_times(views: Sequence[WorkerView]) -> tuple[WorkerView, ...]:
    """A worker that has measured nothing yet is taken to be like those of its role that have, so that one which has
    just started is neither shunned nor swamped."""
    if all(view.request_time is not None for view in views):
        return tuple(views)
    return tuple(view if view.request_time is not None else _like_others(view, views) for view in views)


def _like_others(view: WorkerView, views: Sequence[WorkerView]) -> WorkerView:
    alike = [other for other in views if other.role == view.role]
    return msgspec.structs.replace(
        view,
        request_time=_mean([other.request_time for other in alike]),
        token_time=_mean([other.token_time for other in alike]),
    )


def _mean(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) / len(known) if known else None
