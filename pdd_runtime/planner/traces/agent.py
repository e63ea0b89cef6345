"""Coding agents' sessions, as kv-cache-tester records them: a directory of JSON files (or one), each a session with
its requests' times, lengths and block ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec

from pdd_runtime.planner.traces import agent_table
from pdd_runtime.planner.traces.chains import Chains
from pdd_runtime.planner.traces.lines import Count, decoded, whole, wrong
from pdd_runtime.planner.traces.recorded import Asked, Recorded

Seconds = Annotated[float, msgspec.Meta(ge=0)]
_FORM = '{"block_size": N, "requests": [{"t": S, "in": N, "out": N, "hash_ids": [ID, …]}, …]}'
_DEEPEST = 8
"""Agents that agents begin."""


class _Request(msgspec.Struct):
    t: Seconds = 0.0
    type: str = ""
    prompt: Count = msgspec.field(default=0, name="in")
    output: Count = msgspec.field(default=0, name="out")
    hash_ids: list[int] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    requests: list[_Request] = []
    """Of an entry that is another agent, which this one began."""


class _Session(msgspec.Struct):
    requests: list[_Request]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 64
    hash_id_scope: str = "local"


def read(path: Path) -> Iterator[Recorded]:
    """Sessions by their files' names; those that an agent began come behind its own."""
    if path.name.removesuffix(".gz").endswith(".csv"):
        yield from agent_table.read(path)
        return
    decoder, numbers, common = msgspec.json.Decoder(_Session), count(), None
    for file in _files(path):
        session = decoded(decoder, whole(file), str(file), _FORM)
        if session.hash_id_scope == "local":
            chains = Chains(session.block_size)
        else:
            chains = common = common or Chains(session.block_size)
        found = list(_threads(session.requests, chains, numbers, 0.0, _DEEPEST))
        if not found:
            raise wrong(str(file), "it has no requests", _FORM)
        begun = found[0].delay or 0.0
        yield found[0]._replace(delay=None)
        yield from (other._replace(delay=max(0.0, (other.delay or 0.0) - begun)) for other in found[1:])


def _files(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    if not files:
        raise wrong(str(path), "no file in it ends with .json", f"a directory of files with {_FORM}")
    return files


def _threads(
    requests: Sequence[_Request], chains: Chains, numbers: Iterator[int], begun: float, depth: int
) -> Iterator[Recorded]:
    """One agent's requests as a session, and those of the agents that it began, with their starts on the session's
    clock. `begun`: when this one's times begin."""
    asked: list[Asked] = []
    others: list[Recorded] = []
    start = 0.0
    before: _Request | None = None
    for request in requests:
        if request.requests:
            # Some files give their times on the session's clock, others on the agent's own.
            own = request.t if request.requests[0].t < request.t else 0.0
            if depth:
                others += _threads(request.requests, chains, numbers, begun + own, depth - 1)
            continue
        prompt = max(1, request.prompt)
        spans = chains.spans(request.hash_ids, prompt, next(numbers))
        if before is None:
            start = begun + request.t
        asked.append(Asked(prompt, max(1, request.output), _think(before, request), spans))
        before = request
    if asked:
        yield Recorded(None, tuple(asked), start)
    yield from others


def _think(before: _Request | None, request: _Request) -> float:
    if before is None:
        return 0.0
    if request.think_time is not None:
        return request.think_time
    return max(0.0, request.t - before.t - (before.api_time or 0.0))
