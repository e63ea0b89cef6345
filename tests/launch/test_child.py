from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pdd_runtime.errors import LaunchError
from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.logs import LogFile
from pdd_runtime.plugins.routing import WorkerKey
from tests.waiting import PATIENCE


class Nursery:
    """A child that runs a piece of Python, and what it told its owner."""

    def __init__(self, path: Path, source: str) -> None:
        self.lines: list[str] = []
        self.gone: list[WorkerKey] = []
        self.changed = asyncio.Event()
        spec = ChildSpec("main", 0, "main", "dc-a", (sys.executable, "-c", source), {"GREETING": "hello"})
        self.child = Child(
            spec,
            LogFile(path / "main-0.log"),
            on_change=self.changed.set,
            on_line=lambda spec, line: self.lines.append(line),
            on_exit=self._exited,
        )

    async def _exited(self, key: WorkerKey) -> None:
        self.gone.append(key)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()

    @property
    def state(self) -> str:
        return self.child.status(None).state


WAITS = "import os, sys, time\nprint(os.environ['GREETING'], sys.argv[1:3], flush=True)\nsys.stdin.read()\n"


async def test_a_child_gets_its_environment_its_epoch_and_an_open_stdin(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, WAITS)
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: bool(nursery.lines))
    assert nursery.lines == [f"hello ['--epoch', '{nursery.child.epoch}']"]
    assert nursery.state == "starting"
    assert nursery.child.recorded
    # Ctrl-C in the launcher's terminal does not reach it.
    assert os.getsid(nursery.child.recorded.pid) != os.getsid(0)
    nursery.child.stop()
    await running
    assert nursery.state == "stopped"
    assert nursery.child.recorded is None


async def test_a_child_that_dies_comes_back_in_a_new_epoch_and_says_why(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, WAITS)
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: bool(nursery.lines))
    epoch, recorded = nursery.child.epoch, nursery.child.recorded
    assert recorded
    os.kill(recorded.pid, signal.SIGKILL)
    await nursery.until(lambda: bool(nursery.gone))
    assert nursery.gone == [WorkerKey("main", 0, epoch)]
    await nursery.until(lambda: nursery.state == "backoff")
    assert nursery.child.status(None).note == f"killed by SIGKILL: hello ['--epoch', '{epoch}']"
    await nursery.until(lambda: sum(line.startswith("hello") for line in nursery.lines) == 2)
    assert nursery.child.epoch != epoch
    assert nursery.child.restarts == 1
    assert "launcher: main/0 ended (killed by SIGKILL" in (tmp_path / "main-0.log").read_text()
    nursery.child.stop()
    await running


async def test_the_wait_before_a_restart_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd_runtime.launch.child.FIRST_DELAY", 0.05)
    nursery = Nursery(tmp_path, "raise SystemExit(1)")
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: nursery.child.restarts == 4)
    nursery.child.stop()
    await running
    waits = [line.rpartition(" in ")[2] for line in nursery.lines if "starts again" in line]
    assert waits == ["0.05 s", "0.1 s", "0.2 s", "0.4 s"]


async def test_a_stop_does_not_wait_for_the_back_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd_runtime.launch.child.FIRST_DELAY", 3600.0)
    nursery = Nursery(tmp_path, "raise SystemExit(1)")
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: nursery.state == "backoff")
    nursery.child.stop()
    async with asyncio.timeout(PATIENCE):
        await running


async def test_a_first_start_that_can_never_work_is_an_error_with_its_text(tmp_path: Path) -> None:
    nursery = Nursery(
        tmp_path, "import sys\nprint('loading')\nprint('no model\\n  why: no disk\\n  fix: buy one')\nsys.exit(3)"
    )
    with pytest.raises(LaunchError) as caught:
        await nursery.child.supervise()
    assert caught.value.what == "main/0 cannot start"
    assert caught.value.why == "no model — why: no disk — fix: buy one"
    assert nursery.child.recorded is None


async def test_a_later_start_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd_runtime.launch.child.FIRST_DELAY", 0.05)
    flag = tmp_path / "flag"
    source = f"import pathlib, sys\np = pathlib.Path({str(flag)!r})\nif p.exists(): sys.exit(3)\np.touch()\nsys.exit(1)"
    nursery = Nursery(tmp_path, source)
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: nursery.child.restarts == 3)
    nursery.child.stop()
    await running


async def test_a_kill_ends_a_child_that_resists(tmp_path: Path) -> None:
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(3600)"
    )
    nursery = Nursery(tmp_path, source)
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: bool(nursery.lines))
    nursery.child.stop()
    await nursery.until(lambda: nursery.state == "draining")
    nursery.child.kill()
    async with asyncio.timeout(PATIENCE):
        await running
    assert nursery.child.restarts == 0


async def test_cancelling_the_supervision_leaves_no_process(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, WAITS)
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: bool(nursery.lines))
    recorded = nursery.child.recorded
    assert recorded
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(ProcessLookupError):
        os.kill(recorded.pid, 0)


async def test_a_command_that_does_not_exist_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, "")
    nursery.child.spec = ChildSpec("main", 0, "main", "dc-a", (str(tmp_path / "none"),))
    running = asyncio.create_task(nursery.child.supervise())
    await nursery.until(lambda: nursery.state == "backoff")
    assert nursery.child.status(None).note == "it could not be started: No such file or directory"
    nursery.child.stop()
    await running
