"""What was decided about a graph's variants while it ran, kept beside the graph over restarts."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph, Variant

log = logging.getLogger(__name__)

KEPT = 200
"""Decisions that are remembered; those that stand are always among them."""
MAX_FILE = 4 * 2**20
"""Bytes of the file."""

Kind = Literal["promote", "abort", "rollback", "resume"]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """It holds as long as the graph's file says the same of what it is about."""

    kind: Kind
    """`promote`: it gets all requests. `abort`, and `rollback` where nobody was asked: it gets none. `resume`: it has
    its weight again, and nothing is promoted."""
    variant: str
    by: str
    """Who, in words."""
    why: str = ""
    at: float
    """Seconds since 1970."""
    of: str
    """Digest of what the graph said of the variant; of a promotion, of all of them."""


class _Written(msgspec.Struct):
    decisions: list[Decision]


def digest(graph: Graph, kind: Kind, variant: str) -> str:
    """Of what a decision is about."""
    variants: Iterable[tuple[str, Variant]] = graph.spec.variants.items()
    if kind != "promote":
        variants = ((variant, graph.spec.variants[variant]),)
    text = "\n".join(f"{name} {each.model_dump_json()}" for name, each in variants)
    return xxhash.xxh3_128_hexdigest(text.encode())


def standing(graph: Graph, decisions: Iterable[Decision]) -> dict[str, Decision]:
    """The last promotion that holds, under the name of its variant, and the variants that are out."""
    out: dict[str, Decision] = {}
    promoted: Decision | None = None
    for each in decisions:
        if each.variant not in graph.spec.variants or each.of != digest(graph, each.kind, each.variant):
            continue
        if each.kind == "promote":
            promoted = each
            out.pop(each.variant, None)
        elif each.kind == "resume":
            promoted = None
            out.pop(each.variant, None)
        else:
            out[each.variant] = each
            if promoted is not None and promoted.variant == each.variant:
                promoted = None
    return out if promoted is None else out | {promoted.variant: promoted}


def weights(graph: Graph, decisions: Iterable[Decision]) -> dict[str, float]:
    """Of every variant, as they are now: those of the graph, but for what was decided. The control has all where
    nobody else has any."""
    stands = standing(graph, decisions)
    promoted = next((name for name, each in stands.items() if each.kind == "promote"), None)
    if promoted is not None:
        return {name: float(name == promoted) for name in graph.spec.variants}
    now = {name: 0.0 if name in stands else variant.weight for name, variant in graph.spec.variants.items()}
    return now if any(now.values()) else now | {graph.control: 1.0}


class Journal:
    """The decisions of a graph, in a file that all its frontends on this host share."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None: they are in memory only."""
        self.path = path
        self.decisions: tuple[Decision, ...] = ()
        self._seen: tuple[int, int, int] | None = None

    def look(self) -> bool:
        """Read it again where it has changed. True: it had. One that cannot be read changes nothing, and is told."""
        if self.path is None or (stamp := _stamp(self.path)) == self._seen:
            return False
        self._seen = stamp
        try:
            found = _read(self.path)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("what was decided about variants stays as it was: %s cannot be read: %s", self.path, error)
            return False
        changed, self.decisions = found != self.decisions, found
        return changed

    def hear(self, decisions: Iterable[Decision]) -> bool:
        """Take up what another process has decided. True: there was something new."""
        if self.path is not None:
            return self.look()
        new = [each for each in decisions if each not in self.decisions]
        self.decisions = _kept(tuple(sorted((*self.decisions, *new), key=lambda each: each.at)))
        return bool(new)

    def add(self, made: Callable[[tuple[Decision, ...]], Iterable[Decision]]) -> tuple[Decision, ...]:
        """Enter what `made` says in view of all that was decided before; nobody else decides meanwhile. Returns what
        was entered. Raises `LaunchError` where the file cannot be written: nothing is decided then."""
        if self.path is None:
            more = tuple(made(self.decisions))
            self.decisions = _kept((*self.decisions, *more))
            return more
        try:
            lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.look()
                more = tuple(made(self.decisions))
                if more:
                    self.decisions = _kept((*self.decisions, *more))
                    _write(self.path, msgspec.json.encode(_Written(list(self.decisions))))
                    self._seen = _stamp(self.path)
            finally:
                os.close(lock)
        except OSError as error:
            raise LaunchError(
                "what is decided about variants cannot be kept, so nothing is decided",
                where=str(self.path),
                why=error.strerror or str(error),
                fix="make room there, or change the weights in the graph's file and apply it with `up -d`",
            ) from error
        return more


def _kept(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """The last, with the last of each variant."""
    last: Mapping[str, Decision] = {each.variant: each for each in decisions}
    old = tuple(each for each in decisions[:-KEPT] if any(each is it for it in last.values()))
    return (*old, *decisions[-KEPT:])


def _read(path: Path) -> tuple[Decision, ...]:
    try:
        with path.open("rb") as file:
            return tuple(msgspec.json.decode(file.read(MAX_FILE), type=_Written).decisions)
    except FileNotFoundError:
        return ()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and for the user alone."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
