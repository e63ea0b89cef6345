"""One connection to one etcd server. Of aetcd only the stubs are used: its own client speaks no TLS, and picks up a
watch without saying at which revision."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from pdd_runtime.discovery.etcd.config import EtcdConfig
from pdd_runtime.errors import ConnectionLost, LaunchError, PluginError

CALL = 3.0
"""Seconds for a server to answer."""
_PAGE = 500
"""Keys of one answer."""
_LARGEST = 64 * 2**20
"""Bytes of one message from a server."""
_OPTIONS = (
    ("grpc.max_receive_message_length", _LARGEST),
    # A channel of its own for each attempt, so that nobody waits out what gRPC remembers of the last one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class EtcdRefused(LaunchError):
    """A server answered that it will not serve us: trying again changes nothing."""

    code = "etcd-refused"


class Compacted(ConnectionLost):
    """What happened since the revision asked for is not kept any more."""

    code = "etcd-compacted"


@dataclass(frozen=True)
class Entry:
    """One key; `value` None: it was deleted."""

    key: bytes
    value: bytes | None
    revision: int
    """Of its last change."""
    lease: int = 0


@dataclass(frozen=True)
class Batch:
    """What a watch brings: everything up to `revision` has been told, 0: as before."""

    revision: int
    entries: tuple[Entry, ...]


def stubs() -> ModuleType:
    """aetcd's stubs. Raises `PluginError` where aetcd is not installed."""
    # gRPC's core would write of every lost connection to stderr, and warn of children that never use it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        from aetcd import rpc
    except ImportError as error:
        raise PluginError(
            "discovery etcd cannot speak to etcd",
            where="spec.discovery",
            why=str(error),
            fix="pip install 'pdd-runtime[etcd]'",
        ) from error
    module: ModuleType = rpc
    return module


class EtcdClient:
    """Every call raises `ConnectionLost` when the server is away, and `EtcdRefused` when it says no."""

    def __init__(self, endpoint: str, config: EtcdConfig) -> None:
        self.endpoint = endpoint
        self._config, self._rpc = config, stubs()
        scheme, _, target = endpoint.partition("://")
        if scheme == "https":
            import grpc

            pem = config.certificates()
            credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
            self._channel = self._rpc.secure_channel(target, credentials, options=_OPTIONS)
        else:
            self._channel = self._rpc.insecure_channel(target, options=_OPTIONS)
        self._kv = self._rpc.KVStub(self._channel)
        self._leases = self._rpc.LeaseStub(self._channel)
        self._watches = self._rpc.WatchStub(self._channel)
        self._metadata: tuple[tuple[str, str], ...] = ()

    async def log_in(self) -> None:
        """Be `user`, where there is one. Raises `PluginError` where its password is not known."""
        if self._config.user is None:
            return
        request = self._rpc.AuthenticateRequest(name=self._config.user, password=self._config.password())
        answer = await self._unary(self._rpc.AuthStub(self._channel).Authenticate, request)
        self._metadata = (("token", answer.token),)

    async def get(self, key: bytes) -> Entry | None:
        answer = await self._unary(self._kv.Range, self._rpc.RangeRequest(key=key))
        return next((_entry(kv) for kv in answer.kvs), None)

    async def list(self, prefix: bytes) -> Batch:
        """All keys with the prefix, at one revision."""
        entries: list[Entry] = []
        start, revision = prefix, 0
        while True:
            request = self._rpc.RangeRequest(key=start, range_end=_end(prefix), limit=_PAGE, revision=revision)
            answer = await self._unary(self._kv.Range, request)
            revision = revision or answer.header.revision
            entries += (_entry(kv) for kv in answer.kvs)
            if not answer.more:
                return Batch(revision, tuple(entries))
            start = entries[-1].key + b"\0"

    async def put(self, key: bytes, value: bytes, lease: int, unless_after: int) -> bool:
        """Put it, if its last change is still that of revision `unless_after` (0: there is none). Raises
        `ConnectionLost` also where the lease has expired."""
        put = self._rpc.RequestOp(request_put=self._rpc.PutRequest(key=key, value=value, lease=lease))
        return await self._if_unchanged(key, unless_after, put)

    async def delete(self, key: bytes, unless_after: int) -> bool:
        """Delete it on the same terms."""
        delete = self._rpc.RequestOp(request_delete_range=self._rpc.DeleteRangeRequest(key=key))
        return await self._if_unchanged(key, unless_after, delete)

    async def grant(self, ttl: float) -> int:
        """A lease of `ttl` seconds; returns its id."""
        answer = await self._unary(self._leases.LeaseGrant, self._rpc.LeaseGrantRequest(TTL=max(1, round(ttl))))
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> bool:
        """Renew it; false: it has expired."""
        call = self._leases.LeaseKeepAlive(timeout=CALL, metadata=self._metadata)
        try:
            await self._call(partial(call.write, self._rpc.LeaseKeepAliveRequest(ID=lease)))
            answer = await self._call(call.read)
            return bool(self._present(answer).TTL > 0)
        finally:
            call.cancel()

    async def revoke(self, lease: int) -> None:
        """End it, and every key that hangs on it."""
        await self._unary(self._leases.LeaseRevoke, self._rpc.LeaseRevokeRequest(ID=lease))

    async def watch(self, prefix: bytes, revision: int) -> AsyncGenerator[Batch, None]:
        """What changes from `revision` on; the first batch is empty and says that the watch stands. Raises `Compacted`
        where the server does not know that any more."""
        call = self._watches.Watch(metadata=self._metadata)
        try:
            create = self._rpc.WatchCreateRequest(
                key=prefix, range_end=_end(prefix), start_revision=revision, progress_notify=True
            )
            await self._call(partial(call.write, self._rpc.WatchRequest(create_request=create)))
            while True:
                answer = self._present(await self._call(call.read))
                if answer.compact_revision:
                    raise Compacted(f"etcd keeps nothing before revision {answer.compact_revision}")
                if answer.canceled:
                    raise ConnectionLost("etcd ended the watch", where=self.endpoint, why=answer.cancel_reason)
                entries = tuple(_event(event) for event in answer.events)
                # While a watch catches up, the header is ahead of what it has told.
                told = entries[-1].revision if entries else 0 if answer.created else int(answer.header.revision)
                yield Batch(told, entries)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def _if_unchanged(self, key: bytes, revision: int, operation: Any) -> bool:
        compare = self._rpc.Compare(
            key=key,
            target=self._rpc.Compare.CompareTarget.Value("MOD"),
            result=self._rpc.Compare.CompareResult.Value("EQUAL"),
            mod_revision=revision,
        )
        answer = await self._unary(self._kv.Txn, self._rpc.TxnRequest(compare=[compare], success=[operation]))
        return bool(answer.succeeded)

    async def _unary(self, method: Any, request: Any) -> Any:
        return await self._call(partial(method, request, timeout=CALL, metadata=self._metadata))

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        # gRPC answers the cancellation of who waits for a call with errors of its own; and a channel that is closed
        # cancels its calls, which nobody meant for who waits for them.
        try:
            return await call()
        except self._rpc.AioRpcError as error:
            if _cancelled():
                raise asyncio.CancelledError from error
            raise self._fault(error) from error
        except (self._rpc.BaseError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            if _cancelled():
                raise asyncio.CancelledError from error
            raise ConnectionLost("the connection to etcd is closed", where=self.endpoint, why=str(error)) from error

    def _present(self, answer: Any) -> Any:
        """An answer, and not the end of its stream, which has no fields."""
        if not hasattr(answer, "header"):
            raise ConnectionLost("etcd ended a stream", where=self.endpoint)
        return answer

    def _fault(self, error: Any) -> ConnectionLost | EtcdRefused:
        code, said = error.code().name, " ".join((error.details() or "").split())
        if code == "PERMISSION_DENIED" or (code == "INVALID_ARGUMENT" and "authentication" in said):
            who = f"user {self._config.user}" if self._config.user else "who has no user"
            return EtcdRefused(
                f"etcd refuses {who}",
                where=self.endpoint,
                why=said,
                fix=f"check user and password, and that its role may read and write below {self._config.prefix}/GRAPH/",
            )
        if "user name is empty" in said:
            return EtcdRefused("etcd wants a user", where=self.endpoint, why=said, fix="set spec.discovery.config.user")
        if code == "FAILED_PRECONDITION" and "authentication is not enabled" in said:
            return EtcdRefused(
                "etcd knows no users", where=self.endpoint, why=said, fix="leave user out, or enable etcd's auth"
            )
        return ConnectionLost(
            "etcd does not answer", where=self.endpoint, why=f"{code}: {said.rpartition('last error: ')[2]}"
        )


def _cancelled() -> bool:
    """Whether the cancellation of this task was asked for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _end(prefix: bytes) -> bytes:
    """The first key behind all that begin with the prefix, which ends in `/`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _entry(kv: Any) -> Entry:
    return Entry(bytes(kv.key), bytes(kv.value), int(kv.mod_revision), int(kv.lease))


def _event(event: Any) -> Entry:
    deleted = event.type == 1
    return Entry(
        bytes(event.kv.key), None if deleted else bytes(event.kv.value), int(event.kv.mod_revision), int(event.kv.lease)
    )
