"""What ends a request before its answer is whole: an operator, or its deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdd_runtime.frontend import answer as module
from pdd_runtime.pipeline import Finish
from tests.frontend.test_disconnect import MUCH, ask
from tests.frontend.test_doors import access, by
from tests.frontend.test_keys import line
from tests.waiting import PATIENCE, until

Start = Callable[..., Awaitable[Any]]


async def running(server: Any) -> list[str]:
    """The ids of the sessions that run."""
    return [line.id for line in server.service.recent().running]


def post(server: Any, **body: object) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(server.client.post("/v1/completions", json={"prompt": "x"} | body))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("which", [0, 1, 3])
async def test_an_operator_ends_all_choices_by_the_id_of_any(given: Start, stream: bool, which: int) -> None:
    server = await given(asyncio.Event())
    asked = post(server, prompt=["a", "b"], n=2, stream=stream)
    # The first of each prompt runs, the second waits for its first token.
    await until(lambda: server.driver.sessions == 2)
    ids = await running(server)
    assert len(ids) == 4
    gone = await server.client.delete(f"/pdd/requests/{ids[which]}")
    assert (gone.status_code, gone.json()) == (200, {"id": ids[which], "cancelled": True})
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled_by_operator")
    assert answer.json()["error"]["message"] == "the request was cancelled by an operator"
    await until(lambda: server.driver.sessions == 0)
    assert (await server.client.delete(f"/pdd/requests/{ids[which]}")).status_code == 404


async def test_after_the_first_token_it_is_an_event_of_the_stream(given: Start) -> None:
    server = await given(b"abc", asyncio.Event())
    asked = post(server, stream=True)
    await until(lambda: server.driver.said == 3)
    (id,) = await running(server)
    await server.client.delete(f"/pdd/requests/{id}")
    events = [line[6:] for line in (await asked).text.splitlines() if line.startswith("data: ")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "abc"
    assert json.loads(events[-1])["error"]["code"] == "cancelled_by_operator"


async def test_it_says_whose_key_ended_it_and_a_user_cannot(given: Start, tmp_path: Path) -> None:
    keys = access(tmp_path, line("user", "u"), line("ops", "o", admin=True))
    server = await given(asyncio.Event(), access=keys)
    asked = asyncio.create_task(server.client.post("/v1/completions", json={"prompt": "x"}, headers=by("u")))
    await until(lambda: server.driver.sessions == 1)
    (id,) = await running(server)
    assert (await server.client.delete(f"/pdd/requests/{id}", headers=by("u"))).status_code == 403
    assert (await server.client.delete(f"/pdd/requests/{id}", headers=by("o"))).status_code == 200
    assert (await asked).json()["error"]["message"] == "the request was cancelled by an operator, key ops"


@pytest.mark.parametrize(("of_graph", "of_request"), [(0.05, None), (60.0, 0.05), (0.05, 60.0)])
async def test_the_earlier_deadline_ends_a_request_without_a_token(
    given: Start, of_graph: float, of_request: float | None
) -> None:
    server = await given(asyncio.Event(), deadline=of_graph)
    answer = await post(server, n=2, **({"timeout": of_request} if of_request else {}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    assert "0.05 s" in answer.json()["error"]["message"]
    await until(lambda: server.driver.sessions == 0)


async def test_a_deadline_in_the_middle_is_an_event_of_the_stream(given: Start) -> None:
    server = await given(b"abc", asyncio.Event())
    answer = await post(server, stream=True, timeout=4)
    assert answer.status_code == 200
    assert "abc" in answer.text
    assert '"code":"deadline"' in answer.text
    assert "[DONE]" not in answer.text


async def test_a_deadline_that_is_kept_does_nothing(given: Start) -> None:
    server = await given(b"abc", Finish("length", 0), deadline=60.0)
    assert (await post(server, timeout=30)).json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("timeout", [0, -1, "1", 1e400])
async def test_a_deadline_is_a_time_ahead(given: Start, timeout: object) -> None:
    server = await given(b"abc", Finish("length", 0))
    body = json.dumps({"prompt": "x", "timeout": timeout})
    answer = await server.client.post("/v1/completions", content=body)
    assert answer.status_code == 400


@pytest.mark.parametrize("how", ["operator", "deadline"])
async def test_a_client_that_does_not_read_keeps_nothing(
    given: Start, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.1)
    server = await given(b"x" * MUCH, asyncio.Event())
    asked = {"prompt": "x", "stream": True, "logprobs": 5, "max_tokens": 200}
    _, writer = await ask(server.url, asked | ({"timeout": 2} if how == "deadline" else {}))
    await until(lambda: server.driver.said == MUCH or server.driver.closed)
    if how == "operator":
        (id,) = await running(server)
        await server.client.delete(f"/pdd/requests/{id}")
    await until(lambda: server.driver.sessions == 0)
    await until(lambda: not server.service.recent().running)
    writer.transport.abort()


async def test_one_that_leaves_a_request_behind_another_is_noticed_too(given: Start) -> None:
    """Of two requests that come at once the second is not answered; it must not hide that the client leaves."""
    server = await given(asyncio.Event())
    _, writer = await ask(server.url, {"prompt": "x"})
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await writer.drain()
    await until(lambda: server.driver.sessions == 1)
    writer.close()
    async with asyncio.timeout(PATIENCE):
        await until(lambda: server.driver.sessions == 0)
