"""Digests of large files, kept from one start to the next: reading a 70B model takes minutes, a look at it none."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import platformdirs
import xxhash

from pdd_runtime.models.source import hash_files

log = logging.getLogger(__name__)

_SMALLEST = 2**30
"""Bytes: what is smaller is read in a second or two."""
_CHECKSUM = 32
"""Characters of one."""


class _Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What a file has as long as nobody writes to it, or puts another in its place."""

    path: str
    size: int
    modified: int
    """Nanoseconds; `touch` and `cp -p` set it, but not when that was done:"""
    changed: int
    inode: int


class _Entry(msgspec.Struct, frozen=True):
    files: tuple[_Stamp, ...]
    first: str
    """Hash of what was hashed before them."""
    digest: str


def digest_files(
    files: Sequence[Path], first: bytes = b"", *, root: Path | None = None, smallest: int = _SMALLEST
) -> str:
    """As `hash_files`, which it asks only when the files are not those that an earlier call, of any process, has seen
    at these paths. What it knows is under `root`, by default in the user's cache; an entry that cannot be read, or is
    damaged, counts as none. Of files that have less than `smallest` bytes together nothing is kept."""
    paths = [file.resolve() for file in files]
    stamps = tuple(map(_stamp, paths))
    size = sum(stamp.size for stamp in stamps)
    if size < smallest:
        return hash_files(paths, first)
    root = root or platformdirs.user_cache_path("pdd-runtime") / "digests"
    place = root / xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, paths)))
    key = xxhash.xxh3_128_hexdigest(first)
    known = _read(place)
    if known is not None and (known.files, known.first) == (stamps, key):
        return known.digest
    log.info("reading %.1f GB for the digest of %s", size / 1e9, paths[0].parent)
    digest = hash_files(paths, first)
    # One that changed while it was read may be half the one and half the other.
    if tuple(map(_stamp, paths)) == stamps:
        _write(place, _Entry(stamps, key, digest))
    return digest


def _stamp(path: Path) -> _Stamp:
    stat = path.stat()
    return _Stamp(os.fsencode(path).hex(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def _read(place: Path) -> _Entry | None:
    try:
        data = place.read_bytes()
    except OSError:
        return None
    checksum, text = data[:_CHECKSUM], data[_CHECKSUM:]
    try:
        if xxhash.xxh3_128_hexdigest(text).encode() == checksum:
            return msgspec.json.decode(text, type=_Entry)
        why = "its checksum is wrong"
    except msgspec.MsgspecError as error:
        why = str(error)
    log.warning("the digest kept in %s is of no use (%s): it is made again", place, why)
    return None


def _write(place: Path, entry: _Entry) -> None:
    """Whole or not at all, whoever else writes it now."""
    text = msgspec.json.encode(entry)
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=place.parent, prefix=f"{place.name}-")
        fresh = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(xxhash.xxh3_128_hexdigest(text).encode() + text)
            fresh.replace(place)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning("the digest cannot be kept in %s (%s): every start reads the files anew", place, error)
