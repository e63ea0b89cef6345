"""What of the transport there is in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from pdd_tcp.transport import TcpTransport

Party = Callable[..., TcpTransport]
"""Makes the transport of a worker."""


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("pdd-tcp"))


def sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())
