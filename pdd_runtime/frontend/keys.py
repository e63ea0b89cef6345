"""API keys: who may come in, and what they may ask for.

A key is random and long, so a plain SHA-256 of it is kept: nobody finds it by trying, and no slow hash is needed, as
for passwords that people think of.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from pdd_runtime.errors import GraphError, PddError
from pdd_runtime.graph.secrets import refers, revealed

log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks at the file."""
MAX_FILE = 16 * 2**20
"""Bytes of the file: some 60,000 keys."""
OPERATOR = "(operator)"
"""What the graph's own tools are called; no key of a file can be."""
_PREFIX = "pdd-"
"""So that tools which look for secrets in places where none should be find it."""

_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z")]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the file. Lines of one name are keys of one owner, as while an old one is replaced."""

    name: _Name
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    admin: bool = False
    """For the admin endpoints, and not for the API."""
    requests: _Count | None = None
    """At once."""
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    """Of prompts and answers."""
    max_tokens: _Count | None = None
    """Of one answer."""
    priority: int | None = None
    """The lowest, so most urgent, that it may ask for; also what its requests have that ask for none, where that is
    above 0."""
    share: bool | None = None
    """Its requests share cached KV with those of other keys that do; None: as the graph says."""


def new_key() -> str:
    """256 random bits, for the eyes of its owner alone."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(key: bytes) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key).hexdigest()


def operator_key(secret: str) -> str:
    """By which the graph's own tools come in everywhere. It comes from the graph's secret, so whoever has that knows
    it, and nobody else."""
    return f"{_PREFIX}operator-{hmac.new(secret.encode(), b'operator of the HTTP API', hashlib.sha256).hexdigest()}"


def parse(text: str, where: str) -> list[Key]:
    """The keys of a file. Raises `GraphError`, which shows nothing of a line."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            keys.append(msgspec.json.decode(line, type=Key))
        except msgspec.MsgspecError as error:
            raise GraphError(
                "this is no API key",
                where=f"{where}:{number}",
                why=str(error),
                fix="write a line for each with `pdd-runtime keys add NAME`",
            ) from None
    if len({key.sha256 for key in keys}) < len(keys):
        raise GraphError("a key stands there twice", where=where, fix="remove one of the lines")
    return keys


def read(source: str) -> str:
    """The text of `spec.frontend.keys`. Raises `GraphError`."""
    if refers(source):
        return str(revealed(source, "spec.frontend.keys"))
    try:
        with Path(source).open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise GraphError(f"the file of API keys is larger than {MAX_FILE} bytes", where=source)
        return text.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise GraphError(
            "the file of API keys cannot be read", where=source, why=why, fix="`pdd-runtime keys add NAME` makes it"
        ) from error


class Keys:
    """Those of a graph, as its file has them now."""

    def __init__(self, source: str, operator: Key | None = None) -> None:
        """`operator`: beside those of the file. Raises `GraphError`."""
        self._source, self._operator = source, operator
        self._seen = _stamp(source)
        self._take(parse(read(source), source))

    def find(self, presented: bytes) -> Key | None:
        """Whose key this is. What is compared are hashes, in constant time among those that begin alike."""
        wanted = digest(presented)
        found = None
        for key in self._keys.get(wanted[:8], ()):
            if hmac.compare_digest(key.sha256, wanted):
                found = key
        return found

    async def watch(self) -> None:
        """Take up what changes in the file. Endless. One that cannot be read changes nothing, and is told."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                stamp = await asyncio.to_thread(_stamp, self._source)
                if stamp != self._seen:
                    self._seen = stamp
                    self._take(parse(await asyncio.to_thread(read, self._source), self._source))
                    log.info("API keys read again: %d", len(self))
            except PddError as error:
                log.error("the API keys stay as they were: %s", error)

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._keys.values())

    def _take(self, keys: Iterable[Key]) -> None:
        fresh: dict[str, list[Key]] = {}
        for key in [*keys, *([self._operator] if self._operator else [])]:
            fresh.setdefault(key.sha256[:8], []).append(key)
        self._keys = fresh


def _stamp(source: str) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None: it is not there."""
    try:
        found = Path(source).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
