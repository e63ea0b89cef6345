from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from pdd_runtime.models import digest_cache
from pdd_runtime.models.digest_cache import digest_files
from pdd_runtime.models.source import hash_files

MODIFIED = 1_700_000_000 * 10**9


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "model" / f"{number}.safetensors" for number in range(2)]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(b"weights")
    return files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """The files of each reading."""
    seen: list[list[Path]] = []

    def reading(files: list[Path], first: bytes = b"") -> str:
        seen.append(files)
        return hash_files(files, first)

    monkeypatch.setattr(digest_cache, "hash_files", reading)
    return seen


def entry(root: Path) -> Path:
    [found] = root.iterdir()
    return found


def test_files_that_are_as_they_were_are_not_read_again(files: list[Path], root: Path, reads: list[list[Path]]) -> None:
    for _ in range(2):
        assert digest_files(files, b"config", root=root, smallest=0) == hash_files(files, b"config")
    assert len(reads) == 1
    assert digest_files(files, b"other", root=root, smallest=0) == hash_files(files, b"other")
    assert len(reads) == 2


def test_small_files_leave_no_entry(files: list[Path], root: Path) -> None:
    assert digest_files(files, root=root, smallest=15) == hash_files(files)
    assert not root.exists()
    digest_files(files, root=root, smallest=14)
    assert entry(root)


def test_a_changed_byte_is_seen(files: list[Path], root: Path) -> None:
    before = digest_files(files, root=root, smallest=0)
    files[1].write_bytes(b"weightz")
    os.utime(files[1], ns=(MODIFIED, MODIFIED))
    after = digest_files(files, root=root, smallest=0)
    assert after == hash_files(files) != before


def test_a_changed_byte_is_seen_where_the_time_was_put_back(files: list[Path], root: Path) -> None:
    os.utime(files[1], ns=(MODIFIED, MODIFIED))
    before, changed = digest_files(files, root=root, smallest=0), files[1].stat().st_ctime_ns
    while files[1].stat().st_ctime_ns == changed:  # a file system's clock has ticks
        files[1].write_bytes(b"weightz")
        os.utime(files[1], ns=(MODIFIED, MODIFIED))
    assert digest_files(files, root=root, smallest=0) == hash_files(files) != before


def test_another_file_in_its_place_is_seen(files: list[Path], root: Path) -> None:
    before = digest_files(files, root=root, smallest=0)
    other = files[1].with_name("new")
    other.write_bytes(b"weightz")
    other.replace(files[1])
    assert digest_files(files, root=root, smallest=0) == hash_files(files) != before
    files[1].unlink()
    assert digest_files(files[:1], root=root, smallest=0) == hash_files(files[:1])


def test_a_file_that_changes_while_it_is_read_is_read_again(
    files: list[Path], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(paths: list[Path], first: bytes = b"") -> str:
        digest = hash_files(paths, first)
        files[0].write_bytes(b"other weights")
        return digest

    monkeypatch.setattr(digest_cache, "hash_files", reading)
    digest_files(files, root=root, smallest=0)
    monkeypatch.undo()
    assert digest_files(files, root=root, smallest=0) == hash_files(files)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data.replace(data[-34:-2], b"0" * 32),
        lambda data: b"\xff" * 4096,
    ],
    ids=["empty", "cut", "another digest", "noise"],
)
def test_a_damaged_entry_counts_as_none(
    files: list[Path], root: Path, reads: list[list[Path]], damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    right = digest_files(files, root=root, smallest=0)
    assert callable(damage)
    damaged = damage(entry(root).read_bytes())
    entry(root).write_bytes(damaged)
    assert digest_files(files, root=root, smallest=0) == right
    assert "of no use" in caplog.text
    assert len(reads) == 2
    assert entry(root).read_bytes() != damaged
    assert digest_files(files, root=root, smallest=0) == right
    assert len(reads) == 2


def test_where_nothing_can_be_kept_it_is_made_all_the_same(
    files: list[Path], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.write_text("a file, no directory")
    assert digest_files(files, root=root, smallest=0) == hash_files(files)
    assert "cannot be kept" in caplog.text


def test_two_processes_at_once_leave_one_whole_entry(files: list[Path], root: Path, reads: list[list[Path]]) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        found = list(processes.map(_many, [(files, root)] * 2))
    assert found == [{hash_files(files, str(number).encode()) for number in range(2)}] * 2
    assert digest_files(files, b"1", root=root, smallest=0) == hash_files(files, b"1")
    assert reads == [], "what the last of them wrote last is whole"
    assert entry(root)


def _many(case: tuple[list[Path], Path]) -> set[str]:
    """Calls that write the entry anew: the one before was of another `first`. The last is of 1."""
    files, root = case
    return {digest_files(files, str(call % 2).encode(), root=root, smallest=0) for call in range(200)}
