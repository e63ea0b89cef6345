from __future__ import annotations

from pathlib import Path

from pdd_runtime.launch.logs import MAX_LINE, LogFile, LogReader


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
