"""The port that several processes of a graph listen on together."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Frontend


class Ports:
    """The ports of a graph's frontends, kept as long as this context lasts, and the sockets on which each listens. A
    process and its successor have the same one: what connects while the one leaves and the other comes is lost to
    neither."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._api: int | None = None
        self._host = ""
        self._listening: dict[int, socket.socket] = {}
        """By the frontend's index."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for index in list(self._listening):
            self.vacate(index)

    def keep(self, frontend: Frontend) -> None:
        """The API's, and that of operators. Idempotent. Raises `LaunchError` where one is in use."""
        if self._api is None:
            if frontend.admin is not None and frontend.admin.port != 0:
                self._stack.enter_context(reserved(frontend.admin.host, frontend.admin.port))
            self._host = frontend.host
            self._api = self._stack.enter_context(reserved(frontend.host, frontend.port))

    def listener(self, index: int) -> int:
        """The descriptor of the socket that is this frontend's; who has it must listen on it."""
        assert self._api is not None
        if index not in self._listening:
            family, kind, protocol, address = _address(self._host, self._api)
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Accepted sockets inherit it: Nagle would hold a small chunk back until the one before is acknowledged.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.bind(address)
            self._listening[index] = sock
        return self._listening[index].fileno()

    def vacate(self, index: int) -> None:
        """It has no successor: what connects from now on goes to the others. Idempotent."""
        if (sock := self._listening.pop(index, None)) is not None:
            sock.close()


@contextmanager
def reserved(host: str, port: int, setting: str = "spec.frontend") -> Iterator[int]:
    """Keep `port` (0: any free one) for processes of this user that bind it with SO_REUSEPORT; gives its number.
    Raises `LaunchError` where it is in use, be it by processes that share it among themselves. `setting`: the part of
    the graph that says where."""
    try:
        family, kind, protocol, address = _address(host, port)
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot(host, port, setting, error) from error
    with sock:
        try:
            # For this one bind only: what the last graph left closing does not hold the port, a living one does.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            raise _cannot(host, port, setting, error) from error
        # It never listens, so the kernel gives it no connection.
        yield int(sock.getsockname()[1])


def _address(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, Any]:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )[0]
    return family, kind, protocol, address


def _cannot(host: str, port: int, setting: str, error: OSError) -> LaunchError:
    in_use = error.errno == errno.EADDRINUSE
    return LaunchError(
        f"the frontend cannot listen on {host}:{port}",
        why="another process listens there" if in_use else error.strerror or str(error),
        fix=f"choose another port, --set {setting}.port=9000 (0: any that is free)"
        if in_use or error.errno == errno.EACCES
        else f"choose an address of this machine, --set {setting}.host=127.0.0.1",
    )
