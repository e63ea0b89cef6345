"""The entry of a worker process, which the launcher starts:
`python -m pdd_runtime.worker --graph FILE.json --pool NAME --index N --epoch E --discovery HOST:PORT [--replaces]`.

The graph's secret is in the environment, `PDD_SECRET`. It ends at EOF on stdin, after a drain at SIGTERM or at a line
`drain SECONDS` on stdin (exit code 0), when it cannot start (3), and when its engine fails for good (4).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from pathlib import Path

import uvloop
from pydantic import ValidationError

from pdd_runtime.errors import GraphError, PddError
from pdd_runtime.graph import Graph
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.worker.host import Worker
from pdd_runtime.worker.lifetime import Lifetime, race

log = logging.getLogger("pdd_runtime.worker")

DRAIN_TIME = 8.0
"""Seconds that sessions have to end after SIGTERM; with what follows the process is gone within 10."""
CLOSE_TIME = 5.0
"""Seconds to close, threads and all; then the process goes without."""
CANNOT_START, ENGINE_FAILED = 3, 4


def main() -> None:
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(uvloop.run(_run(options)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pdd_runtime.worker", description="One worker of a graph.")
    parser.add_argument("--graph", type=Path, required=True, help="the graph as JSON")
    parser.add_argument("--pool", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--epoch", required=True)
    parser.add_argument("--discovery", required=True, help="the address that discovery is given")
    parser.add_argument("--succeeds", action="append", default=[], help="digest of what the graph was before")
    parser.add_argument("--replaces", action="store_true", help="be seen only when ready: another has its place")
    return parser.parse_args()


async def _run(options: argparse.Namespace) -> int:
    lifetime = Lifetime()
    try:
        worker = Worker(
            _read_graph(options.graph),
            WorkerKey(options.pool, options.index, options.epoch),
            registry=options.discovery,
            secret=os.environ.get("PDD_SECRET", ""),
            succeeds=tuple(options.succeeds),
            replaces=options.replaces,
        )
    except PddError as error:
        return _cannot_start(error)
    code = 1
    try:
        code = await _serve(worker, lifetime)
    finally:
        # A thread that hangs, in the engine or in a transport, must not make this process outlive its purpose.
        guard = threading.Timer(CLOSE_TIME, _leave, (code,))
        guard.daemon = True
        guard.start()
        await worker.close()
    return code


async def _serve(worker: Worker, lifetime: Lifetime) -> int:
    """Until the process should end; returns its exit code."""
    try:
        if await race(worker.start(), lifetime.over()) == 1:
            return 0
    except PddError as error:
        return _cannot_start(error)
    if await race(worker.failed_for_good(), lifetime.over()) == 0:
        return await _failed(worker)
    if lifetime.orphaned.is_set():
        log.info("%s ends: whoever started it is gone", worker.key)
        return 0
    log.info("%s drains", worker.key)
    patience = DRAIN_TIME if lifetime.patience is None else lifetime.patience
    ended = await race(worker.drain(patience), lifetime.orphaned.wait(), worker.failed_for_good())
    return await _failed(worker) if ended == 2 else 0


async def _failed(worker: Worker) -> int:
    log.error("%s ends: its engine failed: %s", worker.key, await worker.failed_for_good())
    return ENGINE_FAILED


def _cannot_start(error: PddError) -> int:
    print(error, file=sys.stderr, flush=True)
    if error.__cause__ is not None:
        log.error("the cause", exc_info=error.__cause__)
    return CANNOT_START


def _read_graph(path: Path) -> Graph:
    try:
        return Graph.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise GraphError("the graph cannot be read", where=str(path), why=str(error)) from None


def _leave(code: int) -> None:
    log.error("threads still run %g s after the end: leaving without them", CLOSE_TIME)
    os._exit(code)


if __name__ == "__main__":
    main()
