"""The port that several processes of a graph listen on together."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pdd_runtime.errors import LaunchError


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Keep `port` (0: any free one) for processes of this user that bind it with SO_REUSEPORT; gives its number.
    Raises `LaunchError` where it is in use, be it by processes that share it among themselves."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot(host, port, error) from error
    with sock:
        try:
            # For this one bind only: what the last graph left closing does not hold the port, a living one does.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            raise _cannot(host, port, error) from error
        # It never listens, so the kernel gives it no connection.
        yield int(sock.getsockname()[1])


def _cannot(host: str, port: int, error: OSError) -> LaunchError:
    in_use = error.errno == errno.EADDRINUSE
    return LaunchError(
        f"the frontend cannot listen on {host}:{port}",
        why="another process listens there" if in_use else error.strerror or str(error),
        fix="choose another port, --set spec.frontend.port=9000 (0: any that is free)"
        if in_use or error.errno == errno.EACCES
        else "choose an address of this machine, --set spec.frontend.host=127.0.0.1",
    )
