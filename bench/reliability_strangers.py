"""Who is refused at the doors of a running graph, and what is outlived there."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdd_runtime.cli.certificates import Authority
from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.observe import Vitals
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.rpc import Greeting, Tls
from pdd_runtime.testing.faults import RunningGraph
from pdd_runtime.testing.strangers import PATIENCE, Door, crowd, strangers

_LOOK_EVERY = 0.1
_FILES = {"ca": "ca.pem", "cert": "{cluster}.pem", "key": "{cluster}.key"}
_SLOW = b"POST /v1/completions HTTP/1.1\r\nhost: pdd\r\ncontent-le"
"""A request that never goes on."""


async def strangers_at(
    options: argparse.Namespace,
    directory: Path,
    stage: Callable[..., AbstractAsyncContextManager[Any]],
    file: Path,
) -> bool:
    """Whether every one was refused, with its line, and the graph answered all the while."""
    clusters = ("dc-a", "dc-b")
    authority, other = Authority("reliability", 1), Authority("reliability", 1)
    for place, signer in ((directory, authority), (directory / "other", other)):
        place.mkdir(exist_ok=True)
        signer.save(place)
        for cluster in clusters:
            signer.issue(place, cluster)
    both = directory / "both.pem"
    both.write_text((directory / "ca.pem").read_text() + (directory / "other" / "ca.pem").read_text())
    files = "{" + ", ".join(f"{what}: '{directory}/{name}'" for what, name in _FILES.items()) + "}"
    rows: list[dict[str, Any]] = []
    async with stage(options, file, f"spec.security.tls={files}") as on:
        running = on.running
        await _until(lambda: {"main", "frontend"} <= {member.key.pool for member in running.members})
        for pool in ("main", "frontend"):
            member: Member = next(member for member in running.members if member.key.pool == pool)
            cluster = member.cluster
            greeting = Greeting(
                graph="reliability", secret=running.launchers[0].secret, cluster=cluster, name="stranger/0"
            )
            thief = Tls(
                ca=both,
                cert=directory / "other" / f"{cluster}.pem",
                key=directory / "other" / f"{cluster}.key",
                graph="reliability",
                cluster=cluster,
            )
            endpoint = member.plane or member.endpoint
            door = Door(endpoint, greeting, tls_of(running.graph, cluster), thief)
            log = on.state.log(pool, member.key.index)
            for stranger in strangers(door):
                before = log.stat().st_size
                try:
                    told: str | None = await stranger.come(door)
                except (TimeoutError, PddError) as error:
                    told = None
                    print(f"{stranger.name}: {error}")
                logged = await _until(lambda: stranger.is_in(_since(log, before)))  # noqa: B023 - awaited here
                rows.append({"door": f"{pool}/0", "who": stranger.name, "refused": told is not None, "logged": logged})
            async with crowd(door.address, options.crowd) as idle:
                rows.append(
                    {
                        "door": f"{pool}/0",
                        "who": f"{len(idle)} idle connections",
                        "refused": await _answers(on),
                        "logged": "others have come" in _since(log, 0),
                    }
                )
        url = urlsplit(running.url)
        async with crowd((url.hostname or "127.0.0.1", url.port or 80), options.crowd, _SLOW) as slow:
            answered = await _answers(on)
            closed = await _closed(running, len(slow))
            rows.append(
                {
                    "door": "HTTP",
                    "who": f"{len(slow)} slow-loris clients",
                    "refused": answered and closed,
                    "logged": "no whole header" in _since(on.state.log("frontend", 0), 0),
                }
            )
        alive = {process.pid for process in running.processes} == {member.pid for member in running.members}
    if options.format == "json":
        print(json.dumps({"rows": rows, "alive": alive}, indent=2))
    else:
        print(f"{'door':<12}{'who':<38}{'refused or outlived':<21}{'logged':<8}")
        for row in rows:
            print(f"{row['door']:<12}{row['who']:<38}{_yes(row['refused']):<21}{_yes(row['logged']):<8}")
    return alive and all(row["refused"] and row["logged"] for row in rows)


async def _answers(on: Any) -> bool:
    """Whether a user gets an answer."""
    async with Client(on.running.url, PATIENCE, "strangers", on.front, settling=0.0) as client:
        outcome = Outcome(0, 0, 8, now(), now())
        await client.ask(client.body(list(range(40, 48)), 8), outcome)
        return outcome.error is None


async def _closed(running: RunningGraph, count: int) -> bool:
    """Whether the frontend hangs up on nearly all of `count` connections."""
    member = next(member for member in running.members if member.key.pool == "frontend")
    until = now() + PATIENCE
    while now() < until:
        if (await running.ask(member, "process.vitals", Empty(), Vitals)).files < count / 2:
            return True
        await asyncio.sleep(_LOOK_EVERY)
    return False


async def _until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    until = now() + seconds
    while not condition():
        if now() > until:
            return False
        await asyncio.sleep(_LOOK_EVERY)
    return True


def _since(log: Path, size: int) -> str:
    with log.open("rb") as file:
        file.seek(size)
        return file.read().decode(errors="replace")


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
