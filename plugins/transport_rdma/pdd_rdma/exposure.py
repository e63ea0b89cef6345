"""The sending side's agent: its block memory, for others to read."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from pdd_rdma.agent_thread import AgentThread, Backoff
from pdd_rdma.library import Agent, MakeAgent
from pdd_rdma.memory import MemoryType, Region
from pdd_runtime.clock import now

LINGER = 5.0
"""Seconds: a read may still be on its way when the session it belonged to has ended on this side."""


class Exposure(AgentThread):
    """Where a device reads by itself, this only connects. Where software does it, this is half of the work: so the
    agent is called often while somebody has something to read, and not at all otherwise."""

    def __init__(self, make: MakeAgent, memory: memoryview, kind: MemoryType, name: str, *, progresses: bool) -> None:
        """`progresses`: NIXL has a thread of its own for that."""
        super().__init__(make, name)
        self.region, self.type = Region.of(memory), kind
        self._memory, self._progresses = memory, progresses
        self._registered: Any = None
        self._waiting = False
        self._until = 0.0
        self._backoff = Backoff(2e-4, 2e-3)

    def open(self) -> Future[tuple[str, bytes]]:
        """Register the memory. The agent's name and metadata, for its peers."""

        def expose(agent: Agent) -> tuple[str, bytes]:
            self._registered = agent.register_memory(self.region.row(self.type.device), self.type.kind)
            return agent.name, agent.get_agent_metadata()

        return self.submit(expose)

    def stir(self, waiting: bool) -> None:
        """Something was offered or taken; is there still something to be read?"""
        if self._progresses:
            return
        self._until = now() + LINGER
        if waiting != self._waiting:
            self._backoff.reset()
            self._waiting = waiting
            self.wake()

    def step(self, agent: Agent) -> float | None:
        if not self._waiting and now() > self._until:
            return None
        agent.get_new_notifs()
        return self._backoff.pause()

    def leave(self, agent: Agent) -> tuple[()]:
        agent.deregister_memory(self._registered)
        self._registered = None
        return ()
