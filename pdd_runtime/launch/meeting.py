"""Whether a new worker is known to those who will need it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from pdd_runtime.errors import PddError
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.rpc import Greeting, Tls, connect

MEET = 5.0
"""Seconds that frontends have to connect to a worker that they can find."""
_ASK = 3.0
_PAUSE = 0.05


async def met(new: Member, others: Iterable[Member], greeting: Greeting, tls: Tls | None) -> bool:
    """Return when everybody who watches one of `others` watches `new`, too: then they may end without a request that
    finds nobody. False: somebody did not come."""
    known: set[str] = set()
    for other in others:
        # One that does not answer is watched by nobody.
        with suppress(PddError):
            known |= await _watchers(other, greeting, tls)
    with suppress(TimeoutError, PddError):
        async with asyncio.timeout(MEET):
            while known - await _watchers(new, greeting, tls):  # noqa: ASYNC110 - it is another process that knows
                await asyncio.sleep(_PAUSE)
            return True
    return False


async def _watchers(member: Member, greeting: Greeting, tls: Tls | None) -> set[str]:
    connection = await connect(member.endpoint, greeting, tls=tls, timeout=_ASK)
    try:
        return set(await connection.call("worker.watchers", Empty(), tuple[str, ...], timeout=_ASK))
    finally:
        await connection.close()
