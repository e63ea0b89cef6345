from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pdd_runtime.launch.logs import MAX_LINE, LauncherLog, LogFile, LogReader


def test_pieces_of_output_become_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    assert log.feed(b"one\ntw") == ["one"]
    assert log.feed(b"o\r\n\xff\n") == ["two", "�"]
    assert log.feed(b"the end") == []
    assert log.flush() == ["the end"]
    assert list(log.tail) == ["one", "two", "�", "the end"]
    log.close()
    assert (tmp_path / "a.log").read_bytes() == b"one\ntwo\r\n\xff\nthe end\n"


def test_a_line_without_end_takes_no_memory_without_end(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    lines = log.feed(b"x" * (3 * MAX_LINE + 5))
    assert [len(line) for line in lines] == [MAX_LINE] * 3
    assert log.flush() == ["xxxxx"]


def test_a_log_is_bounded_on_disk_and_keeps_the_newest(tmp_path: Path) -> None:
    limit = 4 * MAX_LINE
    log = LogFile(tmp_path / "a.log", max_bytes=limit)
    for number in range(10_000):
        log.feed(b"line %d of many, with some more words in it\n" % number)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["a.log", "a.log.1"]
    assert sum(file.stat().st_size for file in files) <= 2 * limit
    assert (tmp_path / "a.log").read_text().splitlines()[-1].startswith("line 9999 ")


def test_a_log_goes_on_where_an_earlier_run_ended(tmp_path: Path) -> None:
    for run in (b"first\n", b"second\n"):
        log = LogFile(tmp_path / "a.log")
        log.feed(run)
        log.close()
    assert (tmp_path / "a.log").read_text() == "first\nsecond\n"


def test_a_reader_begins_near_the_end_and_follows_into_the_next_file(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=2 * MAX_LINE)
    reader = LogReader(log.path, lines=2)
    assert list(reader.read()) == []
    log.feed(b"1\n2\n3\n")
    follower = LogReader(log.path, lines=2)
    assert list(follower.read()) == ["2", "3"]
    assert list(reader.read()) == ["1", "2", "3"]
    log.feed(b"4\n" + b"x" * MAX_LINE + b"\n" + b"y" * MAX_LINE + b"\n5\n")
    assert (tmp_path / "a.log.1").exists()
    seen = [line[:2] for line in follower.read()]
    assert seen == ["4", "xx", "yy", "5"]
    follower.close()
    reader.close()


def test_what_is_secret_is_not_in_the_log_nor_in_what_is_shown_of_it(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", hide=["first line\nsecond line", "t0psecret", "on"])
    shown = log.feed(b"args: --api-key=t0psecret, on\nthe second line of a key\n")
    log.close()
    assert shown == [*log.tail] == ["args: --api-key=***, on", "the *** of a key"]
    assert log.path.read_text().splitlines() == shown


FULL = """
import logging, resource, sys
import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from pdd_runtime.launch.logs import MAX_LINE, LauncherLog, LogFile, LogReader

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
log = LogFile(Path(sys.argv[1]))
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
for number in range(100):
    assert log.feed(b"line %d of what a process says\\n" % number) == [f"line {number} of what a process says"]
print("trouble:", log.trouble)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.feed(b"again\\n")
print("trouble:", log.trouble)
log.feed(b"and again\\n")
log.close()
"""


def test_a_log_that_cannot_be_written_loses_lines_says_so_once_and_goes_on(tmp_path: Path) -> None:
    """With files that may not grow as they may not on a full disk."""
    path = tmp_path / "a.log"
    said = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True)
    lines = path.read_text().splitlines()
    whole = next(number for number, line in enumerate(lines) if line != f"line {number} of what a process says")
    lost = 100 - whole
    assert 0 < whole < 40
    assert lines[-3:] == [f"launcher: {lost} lines could not be written here", "again", "and again"]
    assert len(lines) <= whole + 4, "of the line that was torn a part"
    assert said.stdout.splitlines() == [
        f"{path}: lines are lost: File too large",
        "trouble: its log cannot be written: File too large",
        f"{path}: it is written again; {lost} lines are lost",
        "trouble: ",
    ]


def test_on_a_full_disk_as_well(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a small filesystem")
    try:
        log = LogFile(disk / "logs" / "a.log")
        log.feed(b"before\n")
        (disk / "filler").touch()
        with suppress(OSError), (disk / "filler").open("ab", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        for number in range(1000):
            log.feed(b"line %d\n" % number)
        assert log.trouble == "its log cannot be written: No space left on device"
        assert log.tail[-1] == "line 999"
        (disk / "filler").unlink()
        log.feed(b"after\n")
        log.close()
        lines = log.path.read_text().splitlines()
        assert (lines[0], lines[-1]) == ("before", "after")
        assert lines[-2].endswith("lines could not be written here")
        assert log.trouble == ""
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_launchers_own_log_is_bounded_too_and_for_the_user_alone(tmp_path: Path) -> None:
    log, path = logging.getLogger("of-the-launcher"), tmp_path / "launcher.log"
    handler = LauncherLog(path, max_bytes=4000)
    log.addHandler(handler)
    for number in range(1000):
        log.warning("line %d", number)
    log.removeHandler(handler)
    handler.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["launcher.log", "launcher.log.1"]
    assert all(file.stat().st_size <= 4000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert path.read_text().endswith(" WARNING line 999\n")
