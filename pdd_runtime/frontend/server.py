"""The HTTP server: its socket, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdd_runtime.errors import LaunchError

_BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind, so that a port in use is found before anything is started. Raises `LaunchError`. `shared`: with others of
    this user that do so, too; it then takes no connections before the server listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"the frontend cannot listen on {host}:{port}", why=str(error), fix=_FIX_HOST) from error
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
            fix=_FIX_PORT if in_use or error.errno == errno.EACCES else _FIX_HOST,
        ) from error
    return sock


_FIX_PORT = "choose another port, --set spec.frontend.port=9000 (0: any that is free)"
_FIX_HOST = "choose an address of this machine, --set spec.frontend.host=127.0.0.1"


def url(sock: socket.socket) -> str:
    """Where clients of this host reach the server."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Protocol(HttpToolsProtocol):
    """uvicorn's, with a way to write a chunk in the middle of an answer without a coroutine and a message for it: the
    scope's `pdd_socket`, this."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["pdd_socket"] = self  # type: ignore[typeddict-unknown-key]

    @property
    def full(self) -> bool:
        """Who writes now should wait, as `send` does."""
        return self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Only once the answer has begun, as chunks. Nothing happens where there is none, or the client has left."""
        if data and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Server(uvicorn.Server):
    """Leaves signals to the process, which has more to stop than this."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

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


def create_server(app: ASGIApp) -> Server:
    """`serve(sockets=[...])` runs it; `stop` stops it."""
    return Server(
        uvicorn.Config(
            app,
            lifespan="off",
            http=Protocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=30,
            # Answers have ended before the server is told to stop; this is for clients that do not hang up.
            timeout_graceful_shutdown=1,
        )
    )
