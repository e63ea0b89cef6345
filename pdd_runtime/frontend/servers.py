"""The HTTP servers of one frontend process: the API's, and the operators' where they have a port of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

from pdd_runtime.frontend.app import Part, create_app
from pdd_runtime.frontend.doors import Access
from pdd_runtime.frontend.server import create_server, listen
from pdd_runtime.frontend.service import Service
from pdd_runtime.frontend.siblings import Siblings
from pdd_runtime.graph import Frontend, leaves_host
from pdd_runtime.graph.models import Admin
from pdd_runtime.waiting import watched


def admin_socket(frontend: Frontend, *, shared: bool) -> socket.socket | None:
    """Where operators are answered; None: on the API's port. `shared`: as in `listen`. Raises `LaunchError`."""
    admin = frontend.admin
    if admin is None and leaves_host(frontend.host):
        # What others can reach is the API alone, unless the graph says so.
        admin = Admin()
    if admin is None:
        return None
    # Of several processes each has a free port of its own: whichever is asked knows what all of them know.
    return listen(admin.host, admin.port, shared=shared and admin.port != 0, setting="spec.frontend.admin")


class Servers:
    """`serve` runs them until `stop`."""

    def __init__(
        self,
        service: Service,
        siblings: Siblings,
        access: Access | None,
        frontend: Frontend,
        api: socket.socket,
        admin: socket.socket | None,
    ) -> None:
        """Raises `GraphError` where the certificate is of no use."""
        parts: dict[socket.socket, tuple[Part, ...]] = {api: ("api", "admin")}
        if admin is not None:
            parts = {api: ("api",), admin: ("admin",)}
        self._servers = [
            (create_server(create_app(service, siblings, access, part), frontend.connections, frontend.tls), sock)
            for sock, part in parts.items()
        ]
        self._access, self._siblings, self._experiment = access, siblings, service.experiment

    async def serve(self) -> None:
        beside = [
            watched(asyncio.create_task(work, name=name), f"{name} are not looked after any more")
            for name, work in self._beside()
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for server, sock in self._servers:
                    group.create_task(server.serve(sockets=[sock]))
        finally:
            for task in beside:
                task.cancel()
            if beside:
                await asyncio.wait(beside)

    def _beside(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        if self._access is not None:
            yield "API keys", self._access.watch()
            yield "limits of API keys", self._siblings.share(self._access.ledger)
        if self._experiment is not None:
            yield "variants and their guardrails", self._siblings.guard(self._experiment)

    async def leave(self) -> None:
        """Take no more connections, and keep none open behind its next answer."""
        for server, _ in self._servers:
            await server.leave()

    def quiet(self, seconds: float) -> bool:
        """Whether nothing has come on any connection for so long."""
        return all(server.quiet(seconds) for server, _ in self._servers)

    def hang_up(self) -> None:
        """Close the connections on which nothing is answered."""
        for server, _ in self._servers:
            server.hang_up()

    def stop(self) -> None:
        for server, _ in self._servers:
            server.stop()
