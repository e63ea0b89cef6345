"""Faults in a graph that runs: what game days are made of, and tests of what goes on all the same.

```python
async with RunningGraph(GraphState("two-by-two")) as running:
    faults = Faults(running)
    await faults.kill(role="main")
    await faults.cut("wan", seconds=10)
    for fault in schedule(running.graph, ("kill", "hang"), span=600, every=20, lasting=5, seed=1):
        ...
        await faults.make(fault)
```

Each method returns when its fault is over: `kill` at once, `hang`, `cut` and the others that last after their seconds,
also when they are cancelled; what was stopped goes on then.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, LaunchError
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.messages import LineCut
from pdd_runtime.testing.etcd_server import EtcdServer
from pdd_runtime.testing.fault_schedule import KINDS, MEANING, Fault, FaultError, Kind, schedule, targets
from pdd_runtime.testing.running_graph import Process, RunningGraph

__all__ = [
    "KINDS",
    "MEANING",
    "Fault",
    "FaultError",
    "Faults",
    "Kind",
    "Process",
    "RunningGraph",
    "schedule",
    "targets",
]

_LOOK_EVERY = 0.1


class Faults:
    """Makes faults in `running`."""

    def __init__(self, running: RunningGraph, etcd: EtcdServer | None = None) -> None:
        """`etcd`: the one that the graph's discovery asks, for faults of it."""
        self.running, self._etcd = running, etcd

    async def make(self, fault: Fault) -> tuple[Process, ...]:
        """Make it now, whatever its time is, and return when it is over, with those that were struck. None where it
        has just ended by itself. Raises `FaultError`."""
        match fault.kind:
            case "kill":
                return await self.kill(fault.target)
            case "hang":
                return await self.hang(fault.target, fault.seconds)
            case "cut":
                await self.cut(fault.target, fault.seconds)
            case "cluster":
                return await self.kill_cluster(fault.target)
            case "etcd":
                await self.lose_etcd(fault.seconds)
            case "disk":
                await self.fill_disk(fault.seconds)
        return ()

    async def kill(self, name: str = "", *, role: str = "", index: int | None = None) -> tuple[Process, ...]:
        """SIGKILL for one worker: that of a `name` (`pool/index`, or a pool), or of a `role`; the first that fits, or
        the one of `index`. Returns when the kernel has ended it."""
        process = self.choose(name, role, index)
        await self._end([process] if process else [])
        return (process,) if process else ()

    async def kill_cluster(self, cluster: str) -> tuple[Process, ...]:
        """SIGKILL for all workers of a cluster at once. Their launcher, which is not of the cluster alone, lives."""
        if cluster not in self.running.graph.spec.clusters:
            raise FaultError(f"there is no cluster {cluster}")
        struck = [one for one in self.running.processes if one.cluster == cluster and one.role != "frontend"]
        await self._end(struck)
        return tuple(struck)

    async def hang(
        self, name: str = "", seconds: float = 5.0, *, role: str = "", index: int | None = None
    ) -> tuple[Process, ...]:
        """SIGSTOP for one worker, chosen as by `kill`, and SIGCONT after `seconds`: its connections stay, and nobody
        answers. It may be killed meanwhile."""
        process = self.choose(name, role, index)
        if process is None or not process.signal(signal.SIGSTOP):
            return ()
        try:
            await asyncio.sleep(seconds)
        finally:
            process.signal(signal.SIGCONT)
        return (process,)

    async def cut(self, link: str, seconds: float) -> None:
        """Nothing passes the emulated `link` in either direction: message plane and transports feel it alike, and
        processes that start meanwhile as well. A cut ends by itself, and cannot be ended earlier."""
        declared = self.running.graph.spec.links.get(link)
        if declared is None or not declared.emulate:
            raise FaultError(f"link {link} cannot be cut", why="only a link of the graph with emulate: true can be")
        until = now() + seconds
        told: set[str] = set()

        async def tell(member: Member) -> None:
            far = declared.between[member.cluster == declared.between[0]]
            # Who starts has no message plane yet, and who hangs does not answer: they are asked again.
            with suppress(ConnectionLost, DeadlineExceeded):
                await self.running.ask(member, "line.cut", LineCut(far, until - now()), type(None))
                told.add(member.key.epoch)

        while now() < until:
            async with asyncio.TaskGroup() as group:
                for member in self.running.members:
                    if member.cluster in declared.between and member.key.epoch not in told:
                        group.create_task(tell(member))
            await asyncio.sleep(min(_LOOK_EVERY, max(0.0, until - now())))

    async def lose_etcd(self, seconds: float) -> None:
        """Kill the etcd that was given, and start it again, empty."""
        if self._etcd is None:
            raise FaultError("there is no etcd to be lost", why="it is not one that was started for this")
        await self._etcd.down()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._etcd.lose_data()
            await self._etcd.up()

    async def fill_disk(self, seconds: float) -> None:
        """No file that the launchers write may grow, as on a full disk: what would be written is refused (EFBIG, where
        a disk says ENOSPC). They write the logs of all processes. Who is started meanwhile can write no file either.
        Linux only."""
        async with self._no_files():
            await asyncio.sleep(seconds)

    def choose(self, name: str = "", role: str = "", index: int | None = None) -> Process | None:
        """Who is meant, as `kill` takes it; None: nobody of that kind runs at this moment. Raises `FaultError` where
        the graph has nobody of that kind."""
        pool, _, number = name.partition("/")
        wanted = int(number) if number.isdecimal() else index
        pools = self.running.graph.spec.pools
        declared = [key for key, value in pools.items() if key == pool or (not pool and role in ("", value.role))]
        if not declared and "frontend" not in (pool, role):
            raise FaultError(f"graph {self.running.graph.name} has no worker {name or role}")
        if not declared:
            declared = ["frontend"]
        fitting = (one for one in self.running.processes if one.pool in declared and wanted in (None, one.index))
        return next(fitting, None)

    async def _end(self, processes: list[Process]) -> None:
        for process in processes:
            process.signal(signal.SIGKILL)
        while any(process.alive for process in processes):  # noqa: ASYNC110 - children of another process
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def _no_files(self) -> AsyncIterator[None]:
        try:
            from resource import RLIMIT_FSIZE, prlimit
        except ImportError:
            raise FaultError("files cannot be kept from growing", why="this system has no prlimit") from None
        before = {launcher.pid: prlimit(launcher.pid, RLIMIT_FSIZE) for launcher in self.running.launchers}
        if not before:
            raise LaunchError("no launcher runs")
        try:
            for pid, (_, hard) in before.items():
                prlimit(pid, RLIMIT_FSIZE, (0, hard))
            yield
        finally:
            usual = next(iter(before.values()))
            # Who was started meanwhile has inherited it.
            for pid in (*before, *(process.pid for process in self.running.processes)):
                with suppress(ProcessLookupError):
                    prlimit(pid, RLIMIT_FSIZE, before.get(pid, usual))
