"""What was decided about a graph's variants while it ran, kept beside the graph over restarts."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import xxhash

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph, Variant

log = logging.getLogger(__name__)

KEPT = 200
"""Decisions that are remembered, the newest, and as many of those that are older and may stand."""
MAX_FILE = 4 * 2**20
"""Bytes of the file."""
LATEST = 253402300799.0
"""Seconds since 1970: the end of the year 9999, after which no calendar has a date."""

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
    at: Annotated[float, msgspec.Meta(ge=0.0, le=LATEST)]
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


def ordered(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """As they were made: the same for all who know them, in whatever order they came to know them."""
    return tuple(sorted(frozenset(decisions), key=lambda each: (each.at, msgspec.structs.astuple(each))))


def telling(decisions: Iterable[Decision]) -> list[Decision]:
    """Of decisions in order those that tell what stands, for any graph: the last of each kind about each variant."""
    last: dict[tuple[Kind, str, str], Decision] = {}
    for each in decisions:
        about = (each.kind, each.variant, each.of)
        last.pop(about, None)  # so that it comes behind those before it
        last[about] = each
    return list(last.values())


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
    """The decisions of a graph, in a file that all its frontends on this host share. What was decided once is never
    taken back, only followed by something else, so whoever knows more adds it, and nobody's file is the only right one.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None: they are in memory only."""
        self.path = path
        self.decisions: tuple[Decision, ...] = ()
        """In order."""
        self._seen: tuple[int, int, int] | None = None

    def look(self) -> bool:
        """Read it again where it has changed. True: there was something new. One that cannot be read changes nothing,
        and is told."""
        if self.path is None or (stamp := _stamp(self.path)) == self._seen:
            return False
        self._seen = stamp
        try:
            found = _read(self.path)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("what was decided about variants stays as it was: %s cannot be read: %s", self.path, error)
            return False
        before, self.decisions = self.decisions, self._with(found)
        return self.decisions != before

    def hear(self, decisions: Iterable[Decision]) -> None:
        """Take up what other processes have decided, here or elsewhere. Where the file cannot be written it holds in
        memory: whoever has decided it has kept it."""
        self.look()
        heard = tuple(decisions)
        if self._with(heard) == self.decisions:
            return
        try:
            self.add(lambda before: heard)
        except LaunchError as error:
            log.error("what others have decided about variants holds until the next restart: %s", error)
            self.decisions = self._with(heard)

    def add(self, made: Callable[[tuple[Decision, ...]], Iterable[Decision]]) -> tuple[Decision, ...]:
        """Enter what `made` says in view of all that was decided before; nobody else decides meanwhile. Returns what
        was entered. Raises `LaunchError` where the file cannot be written: nothing is decided then."""
        if self.path is None:
            more = tuple(made(self.decisions))
            self.decisions = self._with(more)
            return more
        try:
            lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.look()
                more = tuple(made(self.decisions))
                if (together := self._with(more)) != self.decisions:
                    _write(self.path, msgspec.json.encode(_Written(list(together))))
                    self._seen, self.decisions = _stamp(self.path), together
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

    def _with(self, more: Iterable[Decision]) -> tuple[Decision, ...]:
        """All that is remembered when `more` has come, whenever that was decided."""
        together = ordered((*self.decisions, *more))
        if len(together) <= KEPT:
            return together
        kept = frozenset((*telling(together)[-KEPT:], *together[-KEPT:]))
        return tuple(each for each in together if each in kept)


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
