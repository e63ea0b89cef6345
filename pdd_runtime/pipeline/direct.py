"""The routes without a relay: A (an aggregated worker alone) and P-MD (prefill, then main)."""

from __future__ import annotations

import asyncio

from pdd_runtime.pipeline.session import Session


async def aggregated(session: Session) -> None:
    """A: one worker does everything."""
    session.timeline.event(session.workers["main"], "main starts")
    leg, extended = await session.decode("main", "serving the request", 0, session.request.max_tokens)
    session.cached_tokens = session.timeline.cached.main = min(extended.cached, len(session.prompt))
    await session.answer(leg)


async def direct(session: Session) -> None:
    """P-MD: the first token comes from prefill at once, the others when main has the prompt's KV."""
    with session.watching("main"):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.prefill())
            fetch = tasks.create_task(session.fetch("prefill", "main", session.prompt))
        kv, _ = fetch.result()
        known = len(session.log)
        if session.finish is not None:
            await session.settle(known)
            return
        session.timeline.event(session.workers["main"], "main starts")
        leg, _ = await session.decode("main", "decoding", known, session.request.max_tokens - known)
        await kv.close()
        await session.answer(leg)
