from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdd_runtime.errors import LaunchError
from pdd_runtime.launch.identity import alive, birth
from pdd_runtime.launch.leftovers import end_left
from pdd_runtime.launch.state import AlreadyRunningError, GraphState, Launcher, Recorded
from tests.cli.shell import until
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDD_STATE_DIR", str(tmp_path))


def launcher(*processes: subprocess.Popen[bytes]) -> Launcher:
    recorded = tuple(Recorded("main", i, process.pid, birth(process.pid)) for i, process in enumerate(processes))
    return Launcher(pid=os.getpid(), birth=birth(os.getpid()), endpoint="h:1", secret="s", processes=recorded)


def sleeper(code: str = "") -> subprocess.Popen[bytes]:
    """A process that is up and sleeps."""
    source = f"import signal, time\n{code}\nprint(flush=True)\ntime.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="threads outlive the first one on Linux")
def test_a_process_lives_as_long_as_any_of_its_threads() -> None:
    """What it has open, a port say, stays open until then."""
    source = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE)
    born = birth(process.pid)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert birth(process.pid) == born
    process.communicate()
    assert birth(process.pid) == ""


def test_a_process_is_known_by_pid_and_birth() -> None:
    process = sleeper()
    born = birth(process.pid)
    assert born
    assert birth(process.pid) == born
    assert alive(process.pid, born)
    assert not alive(process.pid, "another time")
    process.kill()
    # Dead, but nobody has collected it yet: it does not run any more.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(process.pid, born)
    process.communicate()
    assert birth(process.pid) == ""


def test_the_launchers_file_is_for_the_user_alone() -> None:
    state = GraphState("demo")
    with state.hold():
        state.write_launcher(launcher())
        assert state.running() == launcher()
        assert [known.name for known in GraphState.all()] == ["demo"]
        path = state.directory / "launcher.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(state.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(state.logs.stat().st_mode) == 0o700
        assert sorted(entry.name for entry in state.directory.iterdir()) == ["launcher.json", "lock", "logs"]


def test_a_graph_has_one_launcher_and_the_second_is_told_who_it_is() -> None:
    first, second = GraphState("demo"), GraphState("demo")
    with first.hold():
        first.write_launcher(launcher())
        with pytest.raises(AlreadyRunningError) as caught, second.hold():
            pass
        assert f"its launcher is process {os.getpid()}" in caught.value.why
    with second.hold():
        pass


def test_a_damaged_file_is_no_launcher() -> None:
    state = GraphState("demo")
    with state.hold():
        (state.directory / "launcher.json").write_text("{")
        assert state.running() is None


@pytest.mark.parametrize("name", ["../etc", "a/b", "", "A", "x" * 64, "a\n"])
def test_no_name_leads_out_of_the_state_directory(name: str) -> None:
    with pytest.raises(LaunchError):
        GraphState(name)


def test_a_state_directory_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDD_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="the state directory cannot be used"), GraphState("demo").hold():
        pass
    assert GraphState.all() == []


async def test_what_a_dead_launcher_left_is_ended_even_if_it_resists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd_runtime.launch.leftovers._GRACE", 0.1)
    monkeypatch.setattr("pdd_runtime.launch.leftovers._TERM", 0.3)
    stubborn, stranger = sleeper("signal.signal(signal.SIGTERM, signal.SIG_IGN)"), sleeper()
    record = launcher(stubborn)
    # A pid that has come back as another process is not ours to end.
    reused = Recorded("main", 7, stranger.pid, "another time")
    left = await end_left(Launcher(pid=1, birth="x", endpoint="", secret="", processes=(*record.processes, reused)))
    assert left == record.processes
    assert stubborn.wait(PATIENCE) == -9
    assert stranger.poll() is None
    stranger.kill()
    for process in (stubborn, stranger):
        process.communicate()


def test_parts_of_a_graph_are_told_apart_and_never_run_beside_the_whole() -> None:
    whole, first, second = GraphState("demo"), GraphState("demo@dc-a"), GraphState("demo@dc-b")
    assert (first.graph_name, second.graph_name, whole.graph_name) == ("demo", "demo", "demo")
    with first.hold(), second.hold():
        first.write_launcher(launcher())
        second.check_free()
        for state in (whole, first):
            with pytest.raises(AlreadyRunningError, match="graph demo@dc-a is running already"):
                state.check_free()
        assert [part.name for part in whole.parts()] == ["demo@dc-a"]
        assert first.parts() == []
    first.forget_launcher()
    with whole.hold():
        whole.write_launcher(launcher())
        with pytest.raises(AlreadyRunningError, match="graph demo is running already"):
            second.check_free()


@pytest.mark.parametrize("name", ["demo@", "@dc-a", "demo@dc-a@dc-b", "demo@../x"])
def test_a_part_has_the_name_of_a_cluster(name: str) -> None:
    with pytest.raises(LaunchError, match="is not the name of a graph"):
        GraphState(name)
