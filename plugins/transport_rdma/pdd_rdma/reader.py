"""The receiving side's agent: it reads blocks out of other workers' memory."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdd_rdma.agent_thread import AgentThread, Backoff, NixlError
from pdd_rdma.library import Agent, Handle, MakeAgent
from pdd_rdma.memory import MemoryType, Region, joined, rows

Numbers = NDArray[np.int32]


class Landing(NamedTuple):
    """Where the blocks of one fetch land: a prepared list, and each block's place in it."""

    key: int
    places: Numbers
    own: bool
    """Made for this fetch, and to be released with it."""


class Remote(NamedTuple):
    """Another worker's block memory."""

    agent: str
    region: Region
    type: MemoryType


class _Read(NamedTuple):
    handle: Handle
    agent: str
    done: Future[None]


class Reader(AgentThread):
    """All methods may be called from any thread; what they return is done when its future is.

    NIXL 1.5 cannot end a read: to release its handle, or to forget its peer, leaves UCX free to write into the memory
    later. So a read is waited for; and where it does not come to its end, `rebuild` ends it with the agent.
    """

    def __init__(self, make: MakeAgent, memory: memoryview, kind: MemoryType, name: str) -> None:
        super().__init__(make, name)
        self._memory, self._region, self._type = memory, Region.of(memory), kind
        self._keys = itertools.count(1)
        self._backoff = Backoff(2e-5, 1e-3)
        self._reads: deque[_Read] = deque()
        self._lists: dict[int, Handle] = {}
        self._registered: dict[int, Any] = {}
        self._pool: dict[int, int] = {}
        """Block size to the list of our own blocks of that size."""
        self._remotes: Counter[str] = Counter()
        self._remote_lists: dict[tuple[str, int], int] = {}

    def meet(self, name: str, metadata: bytes) -> Future[None]:
        """Make another agent known. As often as it was met it is to be forgotten."""

        def meet(agent: Agent) -> None:
            if not self._remotes[name]:
                agent.add_remote_agent(metadata)
            self._remotes[name] += 1

        return self.submit(meet)

    def forget(self, name: str) -> Future[None]:
        """Close the connection to a peer, when nothing is being read from it any more."""

        def forget(agent: Agent) -> None:
            if self._remotes[name]:  # Else it was met by an agent that is no more.
                self._remotes[name] -= 1
                self._let_go(agent, name)

        return self.submit(forget)

    def land(self, addresses: NDArray[np.int64], size: int) -> Future[Landing]:
        """Prepare reading into the blocks of `size` bytes at `addresses`. Where they are not all this worker's own
        blocks, those that are none are registered until `lift`."""

        def land(agent: Agent) -> Landing:
            places, odd = np.divmod(addresses - self._region.address, size)
            outside = (odd != 0) | (places < 0) | (places >= self._region.size // size)
            own = self._own_list(agent, size)
            if not outside.any():
                return Landing(own, places.astype(np.int32), own=False)
            key = next(self._keys)
            runs = joined(Region(int(address), size) for address in addresses[outside])
            self._registered[key] = agent.register_memory(rows(runs), "DRAM")
            self._lists[key] = agent.prep_xfer_dlist(
                "", rows(Region(int(address), size) for address in addresses), "DRAM"
            )
            return Landing(key, np.arange(len(addresses), dtype=np.int32), own=True)

        return self.submit(land)

    def lift(self, landing: Landing) -> Future[None]:
        """Undo `land`."""

        def lift(agent: Agent) -> None:
            if landing.own and landing.key in self._lists:
                self._lists.pop(landing.key).release()
                agent.deregister_memory(self._registered.pop(landing.key))

        return self.submit(lift)

    def read(self, remote: Remote, size: int, numbers: Numbers, landing: Landing, indices: Numbers) -> Future[None]:
        """Read the peer's blocks `numbers`, of `size` bytes, into those at `indices` of the landing. Until the future
        is done their memory is NIXL's."""
        done: Future[None] = Future()

        def read(agent: Agent) -> None:
            if landing.key not in self._lists or not self._remotes[remote.agent]:
                raise NixlError("the agent was made anew meanwhile")
            theirs = self._remote_list(agent, remote, size)
            handle = agent.make_prepped_xfer(
                "READ", self._lists[landing.key], landing.places[indices], self._lists[theirs], numbers
            )
            self._reads.append(_Read(handle, remote.agent, done))
            self._backoff.reset()
            self._look(agent, lambda: agent.transfer(handle))

        posted = self.submit(read)
        posted.add_done_callback(
            lambda _: None if posted.exception() is None else done.set_exception(posted.exception())
        )
        return done

    def step(self, agent: Agent) -> float | None:
        for _ in range(len(self._reads)):
            self._reads.rotate(-1)
            self._look(agent, lambda: agent.check_xfer_state(self._reads[-1].handle))
        return self._backoff.pause() if self._reads else None

    def leave(self, agent: Agent) -> list[Future[None]]:
        for handle in (*(read.handle for read in self._reads), *self._lists.values()):
            with contextlib.suppress(Exception):
                handle.release()
        failed = [read.done for read in self._reads]
        for known in (self._reads, self._lists, self._registered, self._pool, self._remotes, self._remote_lists):
            known.clear()
        return failed

    def _look(self, agent: Agent, state_of: Callable[[], str]) -> None:
        """How the last of the reads is doing: where it has ended, its future is done."""
        try:
            state = state_of()
        except Exception as error:
            state = type(error).__name__
        if state == "PROC":
            return
        read = self._reads.pop()
        self._backoff.reset()
        read.handle.release()
        self._let_go(agent, read.agent)
        if state == "DONE":
            read.done.set_result(None)
        else:
            read.done.set_exception(NixlError(f"the read failed: {state}"))

    def _let_go(self, agent: Agent, name: str) -> None:
        """Of a peer that is forgotten, and from which nothing is being read."""
        if self._remotes[name] or any(read.agent == name for read in self._reads):
            return
        if name in self._remotes:
            del self._remotes[name]
            for key in [key for key in self._remote_lists if key[0] == name]:
                self._lists.pop(self._remote_lists.pop(key)).release()
            agent.remove_remote_agent(name)

    def _own_list(self, agent: Agent, size: int) -> int:
        """The list of our own blocks of that size. The memory is registered once."""
        if not self._pool:
            self._registered[0] = agent.register_memory(self._region.row(self._type.device), self._type.kind)
        if size not in self._pool:
            key = self._pool[size] = next(self._keys)
            self._lists[key] = agent.prep_xfer_dlist("", self._region.blocks(size, self._type.device), self._type.kind)
        return self._pool[size]

    def _remote_list(self, agent: Agent, remote: Remote, size: int) -> int:
        key = self._remote_lists.get((remote.agent, size))
        if key is None:
            blocks = remote.region.blocks(size, remote.type.device)
            key = self._remote_lists[remote.agent, size] = next(self._keys)
            self._lists[key] = agent.prep_xfer_dlist(remote.agent, blocks, remote.type.kind)
        return key
