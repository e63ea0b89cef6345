from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.process import ServerProcess
from tests.waiting import PATIENCE, until

HERE = Path(__file__).parent
TREE = 4
"""Processes of tree.py."""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    process = ServerProcess("stock", tmp_path)
    yield process
    await process.stop(patience=0)


def python(code: str, **environment: str) -> Launch:
    return Launch((sys.executable, "-c", code), env=environment)


def tree(pids: Path, *options: str) -> tuple[str, ...]:
    return sys.executable, str(HERE / "tree.py"), str(pids), *options


def alive(pid: int) -> bool:
    """A zombie is not: who takes it in may be slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def read_pids(file: Path) -> list[int]:
    def pids() -> list[int]:
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    await until(lambda: len(pids()) == TREE)
    return pids()


def first_process(pids: list[int]) -> int:
    """The one that leads its group, but no session."""
    return next(pid for pid in pids if os.getpgid(pid) == pid != os.getsid(pid))


async def end(process: ServerProcess) -> EngineError:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.shield(process.ended)


async def test_a_server_that_ends_is_told_of_with_its_code_and_last_words(
    process: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stock")
    await process.start(python("import sys; print('loading'); sys.stderr.write('CUDA out of memory'); sys.exit(3)"))
    error = await end(process)
    assert error.what == "the stock server ended: exit code 3"
    assert error.why == "it said last: loading — CUDA out of memory"
    assert process.last_lines == ("loading", "CUDA out of memory")
    assert [record.getMessage() for record in caplog.records if record.name == "stock"] == list(process.last_lines)
    assert process.pid is None


async def test_a_program_that_is_not_there_is_named(process: ServerProcess) -> None:
    await process.start(Launch(("/opt/nowhere/bin/python",)))
    error = await end(process)
    assert (error.what, error.why) == (
        "the stock server ended: exit code 127",
        "it said last: /opt/nowhere/bin/python: No such file or directory",
    )


async def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="could not be started") as caught:
        await ServerProcess("stock", tmp_path / "gone").start(Launch(("true",)))
    assert str(tmp_path / "gone") in str(caught.value)


async def test_it_runs_in_its_directory_with_its_files_and_without_our_secret(
    process: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDD_SECRET", "s3cret")
    code = "import os, sys; print(open('flags.yaml').read(), os.environ.get('PDD_SECRET'), os.getcwd(), *sys.stdin)"
    await process.start(Launch((sys.executable, "-c", code), files={"flags.yaml": "tp: 2"}))
    await end(process)
    assert process.last_lines == (f"tp: 2 None {tmp_path}",)


async def test_long_lines_and_bars_of_progress_are_cut(process: ServerProcess) -> None:
    await process.start(python(r"print('10%\r100%'); print('x' * 100_000); print('ok', end='')"))
    await end(process)
    first, second, *pieces, last = process.last_lines
    assert (first, second, last) == ("10%", "100%", "ok")
    assert "".join(pieces) == "x" * 100_000
    assert len(pieces) > 1


async def test_a_stop_lets_it_end_in_order(process: ServerProcess) -> None:
    code = """
import signal, sys, time
def leave(number, frame):
    print("bye")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up")
while True: time.sleep(60)
"""
    await process.start(python(code))
    await until(lambda: process.last_lines)
    await process.stop(PATIENCE)
    assert process.last_lines == ("up", "bye")
    assert (await end(process)).what == "the stock server ended: exit code 0"
    await process.stop()


@pytest.mark.parametrize("options", [(), ("stubborn",)])
async def test_a_stop_leaves_none_of_its_processes(
    process: ServerProcess, tmp_path: Path, options: tuple[str, ...]
) -> None:
    await process.start(Launch(tree(tmp_path / "pids", *options)))
    pids = await read_pids(tmp_path / "pids")
    await process.stop(patience=0.2)
    assert [pid for pid in pids if alive(pid)] == []
    assert process.ended.done()


async def test_a_hung_one_is_killed_whole_and_at_once(process: ServerProcess, tmp_path: Path) -> None:
    await process.start(Launch(tree(tmp_path / "pids", "stubborn")))
    pids = await read_pids(tmp_path / "pids")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for _ in range(2):
        process.kill()
    assert (await end(process)).what == "the stock server ended: killed by SIGKILL"
    assert [pid for pid in pids if alive(pid)] == []


async def test_the_cause_is_told_though_much_was_written_behind_it(process: ServerProcess) -> None:
    code = "import sys; print('ValueError: no room'); [print('closing', n) for n in range(100)]; sys.exit(1)"
    await process.start(python(code))
    why = (await end(process)).why
    assert why.startswith("ValueError: no room; it said last: closing 94 — ")
    assert why.endswith("closing 99")


async def test_what_its_first_process_leaves_behind_is_ended(process: ServerProcess, tmp_path: Path) -> None:
    await process.start(Launch(tree(tmp_path / "pids", "stubborn")))
    pids = await read_pids(tmp_path / "pids")
    os.kill(first_process(pids), signal.SIGKILL)
    error = await end(process)
    assert error.what == "the stock server ended: killed by SIGKILL"
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize("options", [(), ("stubborn",)])
async def test_a_killed_worker_takes_all_of_its_server_with_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    pids_file = tmp_path / "pids"
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "killed_worker.py"), str(tmp_path), *tree(pids_file, *options))
    )
    try:
        pids = await read_pids(pids_file)
        assert all(alive(pid) for pid in pids)
    finally:
        worker.kill()
        await worker.wait()
    await until(lambda: not any(alive(pid) for pid in pids))
