"""The routes without a relay: one worker alone (A, and whoever goes on alone) and P-MD (prefill, then main)."""

from __future__ import annotations

import asyncio

from pdd_runtime.pipeline.part import Part


async def alone(part: Part) -> None:
    """One worker does everything, or all that is left to do."""
    session = part.session
    known = len(session.log)
    part.needs("main")
    session.timeline.event(session.crew["main"], "main starts")
    leg, extended = await part.decode("main", "serving the request", known, session.request.max_tokens - known)
    if not known:
        session.cached_on_main(extended.cached)
        session.cached_tokens = session.timeline.cached.main or 0
    await part.answer(leg)


async def direct(part: Part) -> None:
    """P-MD: the first token comes from prefill at once, the others when main has the prompt's KV."""
    session = part.session
    part.needs("main")
    async with asyncio.TaskGroup() as tasks:
        if not session.log:
            tasks.create_task(part.prefill())
        fetch = tasks.create_task(part.fetch("prefill", "main", session.prompt))
    kv, _ = fetch.result()
    known = len(session.log)
    if session.finish is not None:
        await part.settle(known)
        return
    session.timeline.event(session.crew["main"], "main starts")
    leg, _ = await part.decode("main", "decoding", known, session.request.max_tokens - known)
    await kv.close()
    await part.answer(leg)
