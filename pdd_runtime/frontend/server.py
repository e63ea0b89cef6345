"""The HTTP server: its socket, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from pdd_runtime.errors import GraphError, LaunchError
from pdd_runtime.frontend.handshake import TlsListener
from pdd_runtime.frontend.protocol import Connections, Protocol
from pdd_runtime.graph.models import FrontendTls
from pdd_runtime.rpc import within_files

_BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool = False, setting: str = "spec.frontend") -> socket.socket:
    """Bind, so that a port in use is found before anything is started. Raises `LaunchError`. `shared`: with others of
    this user that do so, too; it then takes no connections before the server listens. `setting`: the part of the graph
    that says where."""
    other_port = f"choose another port, --set {setting}.port=9000 (0: any that is free)"
    other_host = f"choose an address of this machine, --set {setting}.host=127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"the frontend cannot listen on {host}:{port}", why=str(error), fix=other_host) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: Nagle would hold a small chunk back until the one before is acknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if not shared:
            sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        in_use = error.errno == errno.EADDRINUSE
        raise LaunchError(
            f"the frontend cannot listen on {host}:{port}",
            why="another process listens there" if in_use else error.strerror or str(error),
            fix=other_port if in_use or error.errno == errno.EACCES else other_host,
        ) from error
    return sock


def url(sock: socket.socket, *, tls: bool = False) -> str:
    """Where clients of this host reach the server."""
    scheme = "https" if tls else "http"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server(uvicorn.Server):
    """Leaves signals to the process, which has more to stop than this."""

    servers: list[asyncio.Server | TlsListener]  # type: ignore[assignment]

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.servers = []
        self._connections = connections
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def leave(self) -> None:
        """Take no more connections, and keep none open behind its next answer."""
        # Two turns of the loop: what the kernel has taken for this process nobody else can answer.
        for _ in range(2):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        self._connections.last = True

    def quiet(self, seconds: float) -> bool:
        """Whether nothing has come on any connection for so long."""
        idle, time = self._connections.idle, asyncio.get_running_loop().time()
        whole = len(idle) == len(self.server_state.connections)
        return whole and all(time - since >= seconds for since in idle.values())

    def hang_up(self) -> None:
        """Close the connections on which nothing is answered."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        if config.ssl is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup(sockets=[])
        make = partial(  # type: ignore[call-arg]
            config.http_protocol_class, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self.servers = [
            TlsListener(sock, _BACKLOG, config.ssl, make, self._connections, within_files(SHAKING, 4))
            for sock in sockets
        ]

    def stop(self) -> None:
        """Have `serve` return."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        # uvicorn's own wakes up ten times a second; once is enough for the date in the headers.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._stopped.wait()


def more_files() -> None:
    """Let this process open as many files, and so connections, as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


MOST = 4096
"""Connections at once, where the graph does not say."""
SHAKING = 512
"""Clients of HTTPS at once that have not ended their handshake."""


def create_server(app: ASGIApp, most: int = MOST, tls: FrontendTls | None = None) -> Server:
    """`serve(sockets=[...])` runs it; `stop` stops it. `most`: connections at once; fewer where this process may not
    open so many files. Raises `GraphError` for a certificate that is of no use."""
    connections = Connections(within_files(most, 2))
    server = Server(
        uvicorn.Config(
            app,
            lifespan="off",
            http=partial(Protocol, connections=connections),  # type: ignore[arg-type]
            ssl_certfile=tls.cert if tls else None,
            ssl_keyfile=tls.key if tls else None,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            # Answers have ended before the server is told to stop; this is for clients that do not hang up.
            timeout_graceful_shutdown=1,
        ),
        connections,
    )
    try:
        server.config.load()
    except (OSError, ssl.SSLError) as error:
        raise GraphError(
            "the frontend's certificate cannot be used",
            where="spec.frontend.tls",
            why=str(error),
            fix="name a PEM file with the certificate, and one with its key, without a password",
        ) from error
    return server
