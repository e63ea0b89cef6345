"""Whether a graph answers requests, asked as a load balancer would."""

from __future__ import annotations

import httpx


async def why_not_ready(client: httpx.AsyncClient, url: str) -> str:
    """What the frontend at `url` says is missing; empty: a whole route exists."""
    if not url:
        return "the frontend is not there yet"
    try:
        answer = await client.get(f"{url}/ready")
    except httpx.HTTPError as error:
        return f"the frontend does not answer: {error}"
    return "" if answer.is_success else _reason(answer)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the frontend answers {answer.status_code}"
