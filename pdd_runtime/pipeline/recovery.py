"""What a session can recover from, and how it says so."""

from __future__ import annotations

from typing import TypeVar

from pdd_runtime.errors import (
    Cancelled,
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    PddError,
    RemoteError,
    TransferError,
    WorkerLost,
)
from pdd_runtime.pipeline.peers import Peer

E = TypeVar("E", bound=PddError)

RECOVERABLE = (
    WorkerLost,
    EngineError,
    CapacityError,
    DeadlineExceeded,
    ConnectionLost,
    TransferError,
    Cancelled,
    RemoteError,
)
"""When a worker raises these, another one may do better. Not when the request itself is wrong."""


class Silent(WorkerLost):
    """A worker has not been heard for a while, and another one can go on."""

    code = "silent"


def recoverable(error: PddError) -> bool:
    """Somebody else may do better."""
    return isinstance(error, RECOVERABLE) and error.worker is not None


def failed_at(peer: Peer, error: E) -> E:
    """`error`, as a failure of that worker."""
    if error.worker is None:
        error.worker = peer
    return error


def worker_lost(peer: Peer, doing: str, why: str = "", kind: type[WorkerLost] = WorkerLost) -> WorkerLost:
    """The error of a session whose worker died, or fell silent."""
    error = kind(
        f"worker {peer} ({peer.member.role}) was lost while {doing}",
        why=why or ("nothing was heard of it for a while" if kind is Silent else "its connection ended"),
        fix=f"send the request again; `pdd-runtime logs` of pool {peer.key.pool} may say what happened to it",
    )
    return failed_at(peer, error)


def gave_up(error: PddError, why: str) -> PddError:
    """`error`, as the user gets it: nobody could go on."""
    return type(error)(error.what, where=error.where, why="; ".join(filter(None, (error.why, why))), fix=error.fix)
