"""The route P-RLD: the relay serves the request to its end, and main never hears of it.

For requests that nothing will build on. Their KV is not where main's next request would find it, so they are bounded:
were they many, main's hit rate would fall behind prefill's, and ever more requests would need the relay.
"""

from __future__ import annotations

from pdd_runtime.pipeline.part import Part
from pdd_runtime.plugins.engine import Token


async def finish_on_relay(part: Part) -> None:
    """P-RLD: prefill, then the relay."""
    session = part.session
    part.needs("relay")
    if not session.log:
        part.start(part.prefill())
    kv, _ = await part.fetch("prefill", "relay", session.prompt)
    await session.until(lambda: len(session.log) > 0, "the first token")
    known = len(session.log)
    if session.finish is None:
        leg = await part.open_decode("relay", "relaying to the end", known, session.request.max_tokens - known)
        session.timeline.event(leg.peer, "relay starts")
        await part.extended(leg)

        def take(tokens: tuple[Token, ...]) -> None:
            session.accept(tokens, "relay")

        stopped = await part.follow(leg, take)
        session.timeline.event(leg.peer, f"relay stops: {stopped.reason}")
        session.end("stop" if stopped.reason == "stop" else "length")
    await kv.close()
