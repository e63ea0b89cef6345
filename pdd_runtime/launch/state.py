"""The state directory of a graph: its JSON, who its launcher is, its logs."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import platformdirs

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph
from pdd_runtime.launch.identity import alive
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.rpc import Tls

ROOT = "PDD_STATE_DIR"
"""Environment: where state directories are, instead of the user's."""

_NAME = re.compile(r"[a-z0-9-]{1,63}(@[a-z0-9-]{1,63})?")


class Recorded(msgspec.Struct, frozen=True):
    """A process that was started, so that it can be found and stopped when its launcher is dead."""

    pool: str
    index: int
    pid: int
    birth: str


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """launcher.json."""

    pid: int
    birth: str
    """See `identity.birth`."""
    endpoint: str
    secret: str
    url: str = ""
    marks: tuple[str, ...] = ()
    """Digests of what its graph was since it was started, the last one being what it is."""
    processes: tuple[Recorded, ...] = ()

    @property
    def alive(self) -> bool:
        return alive(self.pid, self.birth)

    @property
    def left(self) -> tuple[Recorded, ...]:
        """Its processes that still run."""
        return tuple(process for process in self.processes if alive(process.pid, process.birth))


def root() -> Path:
    """Where state directories are."""
    return Path(os.environ.get(ROOT) or platformdirs.user_state_dir("pdd-runtime"))


class GraphState:
    """The files of the graph called `name`, or of its part `name@cluster`, below `base` where that is given, else
    among the user's own."""

    def __init__(self, name: str, base: Path | None = None) -> None:
        # It becomes a path, and `ps` takes it from the command line.
        if not _NAME.fullmatch(name):
            raise LaunchError(f'"{name}" is not the name of a graph', fix="name a graph, or its file")
        self.name = name
        self.graph_name = name.partition("@")[0]
        self.directory = (base or root()) / name
        self.graph = self.directory / "graph.json"
        self.logs = self.directory / "logs"
        self.launcher_log = self.directory / "launcher.log"
        self._launcher = self.directory / "launcher.json"

    @staticmethod
    def all(*, stopped: bool = False) -> list[GraphState]:
        """Those that run, or whose launcher died; with `stopped` those, too, that were stopped in order."""
        sign = "graph.json" if stopped else "launcher.json"
        try:
            paths = sorted(root().iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [GraphState(path.name) for path in paths if _NAME.fullmatch(path.name) and (path / sign).exists()]

    def make(self) -> None:
        """The directories, for the user alone. Raises `OSError`."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.logs.mkdir(mode=0o700, exist_ok=True)

    def log(self, pool: str, index: int) -> Path:
        return self.logs / f"{pool}-{index}.log"

    def launcher(self) -> Launcher | None:
        """Who launched it last; None: nobody, or it was stopped in order."""
        try:
            return msgspec.json.decode(self._launcher.read_bytes(), type=Launcher)
        except (OSError, msgspec.MsgspecError):
            return None

    def read_graph(self) -> Graph | None:
        """As it was launched; None: it never was."""
        try:
            return Graph.model_validate_json(self.graph.read_bytes())
        except (OSError, ValueError):
            return None

    def tls(self) -> Tls | None:
        """By which its launcher knows who asks. Raises `GraphError`, also where the certificates are not there."""
        graph = self.read_graph()
        if graph is None:
            return None
        return tls_of(graph, self.name.partition("@")[2] or graph.frontend_cluster)

    def running(self) -> Launcher | None:
        """Its launcher, if that is alive."""
        launcher = self.launcher()
        return launcher if launcher and launcher.alive else None

    def parts(self, *, stopped: bool = False) -> list[GraphState]:
        """Those of `all` that are of the same graph, other than this."""
        return [
            state
            for state in GraphState.all(stopped=stopped)
            if state.graph_name == self.graph_name and state.name != self.name
        ]

    def check_free(self) -> None:
        """Raises `AlreadyRunningError` where the graph runs, or where a part of it would run twice."""
        for state in (self, *self.parts()):
            whole = self.graph_name in (self.name, state.name)
            if (whole or state is self) and state.running():
                raise state.runs_already()

    def write_launcher(self, launcher: Launcher) -> None:
        """It holds a secret: only the user may read it."""
        _write(self._launcher, msgspec.json.encode(launcher))

    def write_graph(self, text: str) -> None:
        _write(self.graph, text.encode())

    def forget_launcher(self) -> None:
        """All is stopped. The logs stay."""
        self._launcher.unlink(missing_ok=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the graph's only launcher. The kernel lets go of it however the process ends. Raises `LaunchError`."""
        try:
            self.make()
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(
                "the state directory cannot be used",
                where=str(self.directory),
                why=error.strerror or str(error),
                fix=f"set {ROOT} to a directory that you can write",
            ) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self.runs_already() from error
            yield
        finally:
            os.close(lock)

    def runs_already(self) -> AlreadyRunningError:
        launcher = self.launcher()
        about = f"its launcher is process {launcher.pid}" if launcher else "another `up` is just starting it"
        at = f", its URL is {launcher.url}" if launcher and launcher.url else ""
        return AlreadyRunningError(
            f"graph {self.name} is running already",
            why=about + at,
            fix=f"use it, change it with `up -d`, stop it with `pdd-runtime down {self.name}`, or start another with "
            "--set metadata.name=…",
        )


class AlreadyRunningError(LaunchError):
    """Another launcher holds the graph."""

    code = "already-running"


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and for the user alone."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
