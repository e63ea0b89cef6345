"""One tree of errors. Each says what happened, where, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar


class PddError(Exception):
    """Base of every error this project raises on purpose.

    `what` is the sentence a user reads first, `where` a file:line, a worker or a request,
    `why` the cause, `fix` the next thing to do. `code` is stable: it crosses the wire and
    appears in API errors, so that the other side raises the same class again.
    """

    code: ClassVar[str] = "error"
    worker: Hashable = None
    """Which one failed, where a session knows that. Stays in this process."""
    _classes: ClassVar[dict[str, type[PddError]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        PddError._classes[cls.code] = cls

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        tail = [f"why: {self.why}"] if self.why else []
        tail += [f"fix: {self.fix}"] if self.fix else []
        return "\n  ".join([head, *tail])

    def to_wire(self) -> dict[str, str]:
        """The error as plain strings, for a message to another process."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "fix": self.fix,
        }

    @staticmethod
    def from_wire(data: dict[str, str]) -> PddError:
        """The error again, of its own class where this process knows it, else a `RemoteError`."""
        cls = PddError._classes.get(data.get("code", ""), RemoteError)
        return cls(
            data.get("what", "unknown error"),
            where=data.get("where", ""),
            why=data.get("why", ""),
            fix=data.get("fix", ""),
        )


class RemoteError(PddError):
    """An unexpected exception on the other side; its type and message stand in `what`."""

    code = "remote"


class GraphError(PddError):
    """The graph YAML is wrong. `where` is file:line:column."""

    code = "graph"


class PluginError(PddError):
    """A plugin is missing, broken, named twice, or got a wrong config."""

    code = "plugin"


class LayoutError(PddError):
    """Two KV layouts cannot be joined."""

    code = "layout"


class CapacityError(PddError):
    """A bounded resource (blocks, queue, context) has no room for this request."""

    code = "capacity"


class Overloaded(PddError):
    """More is asked for than can be served; refused before anything was begun."""

    code = "overloaded"
    retry_after: float = 1.0
    """Seconds after which trying again makes sense."""


class RpcError(PddError):
    """The message plane failed: protocol, frame limit, unknown method."""

    code = "rpc"


class ConnectionLost(RpcError):
    """The peer went away."""

    code = "connection-lost"


class DeadlineExceeded(PddError):
    """A wait ran past its deadline; `what` names the wait."""

    code = "deadline"


class Cancelled(PddError):
    """The request was cancelled by its owner."""

    code = "cancelled"


class TransferError(PddError):
    """KV could not be moved; what arrived stays committed."""

    code = "transfer"


class EngineError(PddError):
    """An engine could not start or failed on a request."""

    code = "engine"


class RequestError(PddError):
    """The user's request is wrong. `where` names the field."""

    code = "request"


class WorkerLost(PddError):
    """A worker that held part of a session died."""

    code = "worker-lost"


class NoRoute(PddError):
    """No live set of workers can serve the request."""

    code = "no-route"


class LaunchError(PddError):
    """Processes could not be brought up, found or stopped."""

    code = "launch"


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The single errors in a group and the groups in it, in order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
