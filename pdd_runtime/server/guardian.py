"""Stands between a worker and its server, so that no part of the server outlives the worker, even one that was killed:
`python -m pdd_runtime.server.guardian PROGRAM ARGUMENT…`.

Its stdin tells that the worker lives. SIGTERM is passed on to the server's process group. At EOF the group is told to
end, gets `GRACE`, unless SIGTERM came before, and then everything that descends from the server is killed: also what
moved to a group or session of its own, as the parts of a server do. The exit code is the server's, or 128 and the
number of the signal that ended it.

The standard library alone, and nothing of this project: this process is small, and begins at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL where the worker is gone: memory of an accelerator, ports and shared memory are
returned in order."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOT_FOUND = 127


class Guardian:
    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._term = False
        """Whether the server was told to end."""
        self._code: int | None = None
        self._pid = 0

    def run(self) -> int:
        """Returns the exit code when nothing of the server is left."""
        # Orphans of the server become our children, wherever they went, and can be found.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wake, woken = os.pipe()
        for end in (wake, woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._pid = self._start()
        self._watch(wake)
        self._end_all()
        return self._code if self._code is not None else 1

    def _start(self) -> int:
        guardian = os.getpid()
        pid = os.fork()
        if pid:
            with suppress(OSError):  # the child does the same: whoever comes first
                os.setpgid(pid, pid)
            return pid
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # Should this process be killed, the server's first process at least goes with it.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(self._argv[0], self._argv)
        except OSError as error:
            print(f"{self._argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_NOT_FOUND)

    def _watch(self, wake: int) -> None:
        """Until the server has ended, or has to."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(0, select.POLLIN)
        while not self._reap():
            ready = [number for number, _ in poll.poll()]
            if wake in ready:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
            if 0 in ready and not _read():
                self._part(poll, wake)
                return

    def _part(self, poll: select.poll, wake: int) -> None:
        """The worker is gone, or has lost its patience."""
        if self._term:
            return
        self._on_term(signal.SIGTERM, None)
        poll.unregister(0)
        end = time.monotonic() + GRACE
        while not self._reap() and (left := end - time.monotonic()) > 0:
            poll.poll(left * 1000)
            with suppress(BlockingIOError):
                os.read(wake, 4096)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._term = True
        # A group whose first process is not yet reaped keeps its number.
        if self._pid and self._code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGTERM)

    def _reap(self) -> bool:
        """Take in whoever has ended. Whether the server's first process has."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._code = code if code >= 0 else 128 - code
        return self._code is not None

    def _end_all(self) -> None:
        """Kill until nobody is left: who is born meanwhile becomes our child when its parent dies."""
        while True:
            if self._code is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            try:
                if not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    time.sleep(0.01)  # the kernel is still at it
            except ChildProcessError:
                return


def _read() -> bytes:
    try:
        return os.read(0, 4096)
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """All of them, where the system has /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in parentheses, may hold anything.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, new = [], children.get(pid, [])
    while new:
        found += new
        new = [child for parent in new for child in children.get(parent, [])]
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


if __name__ == "__main__":
    sys.exit(Guardian(sys.argv[1:]).run())
