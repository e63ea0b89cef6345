"""Who may come in where, and what their key lets them ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdd_runtime.frontend.doors import Access
from pdd_runtime.frontend.keys import OPERATOR, Key, Keys, digest, operator_key
from pdd_runtime.pipeline import Finish
from tests.frontend.test_keys import line
from tests.waiting import until

Start = Callable[..., Awaitable[Any]]
ANSWER = (b"abc", Finish("length", 0))
OF_OPERATORS = ["/metrics", "/pdd/requests", "/pdd/requests/req-0", "/pdd/workers", "/pdd", "/nothing"]
OF_THE_API = ["/v1/models", "/v1/models/x", "/v1/nothing", "/pdd/tokenizer/tokenizer.json"]


def access(directory: Path, *lines: str, share: bool = False) -> Access:
    file = directory / "keys.jsonl"
    file.write_text("".join(lines))
    operator = Key(name=OPERATOR, sha256=digest(operator_key("secret").encode()), admin=True)
    return Access(Keys(str(file), operator), operator, share=share)


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(server: Any, key: str, **more: object) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 3} | more
    answer: httpx.Response = await server.client.post("/v1/completions", json=body, headers=by(key))
    return answer


async def test_every_path_asks_for_the_key_that_it_is_for(given: Start, tmp_path: Path) -> None:
    server = await given(*ANSWER, access=access(tmp_path, line("user", "u"), line("ops", "o", admin=True)))

    async def status(path: str, key: str | None) -> int:
        headers = by(key) if key else {}
        return int((await server.client.get(path, headers=headers)).status_code)

    for path in OF_OPERATORS + OF_THE_API:
        own, other = ("o", "u") if path in OF_OPERATORS else ("u", "o")
        assert [await status(path, key) for key in (None, "wrong", other)] == [401, 401, 403], path
        assert await status(path, own) in (200, 404), path
        assert await status(path, operator_key("secret")) in (200, 404), path
    for path in ("/health", "/ready", "/openapi.json", "/docs"):
        assert await status(path, None) == 200


async def test_who_is_refused_is_told_in_openais_form_and_begins_nothing(
    given: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await given(*ANSWER, access=access(tmp_path, line("user", "u")))
    for headers in (
        {},
        {"authorization": "Basic dTp1"},
        {"authorization": "Bearer"},
        by("not-this-one"),
        [("authorization", "Bearer u"), ("authorization", "Bearer u")],
    ):
        answer = await server.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert answer.headers["x-pdd-request-id"].startswith("req-")
    assert server.driver.requests == []
    assert "not-this-one" not in caplog.text
    assert "refused to 127.0.0.1" in caplog.text


async def test_no_path_writes_lines_of_its_own_into_the_log(
    given: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await given(*ANSWER, access=access(tmp_path))
    await server.client.get("/x%0Aforged%0D%0Aline" + "y" * 500)
    (record,) = [record for record in caplog.records if record.name.endswith("doors")]
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 200


async def test_requests_carry_their_owner_and_share_kv_with_no_other(given: Start, tmp_path: Path) -> None:
    lines = [line("alice", "a"), line("bob", "b"), line("carol", "c", share=True), line("dave", "d", share=True)]
    server = await given(*ANSWER, access=access(tmp_path, *lines))
    for key, salt in (("a", ""), ("a", "x"), ("b", ""), ("b", "alice/x"), ("c", ""), ("d", ""), ("c", "alice/x")):
        assert (await ask(server, key, cache_salt=salt)).status_code == 200
    requests = server.driver.requests
    assert [request.tenant for request in requests] == ["alice", "alice", "bob", "bob", "carol", "dave", "carol"]
    salts = [request.salt for request in requests]
    assert salts[4] == salts[5]
    assert len(set(salts)) == 6
    listed = (await server.client.get("/pdd/requests", headers=by(operator_key("secret")))).json()["requests"]
    assert [one["key"] for one in listed][-1] == "alice"


async def test_a_graph_may_have_all_its_keys_share(given: Start, tmp_path: Path) -> None:
    lines = [line("alice", "a"), line("bob", "b"), line("carol", "c", share=False)]
    server = await given(*ANSWER, access=access(tmp_path, *lines, share=True))
    for key in "abc":
        await ask(server, key, cache_salt="s")
    a, b, c = [request.salt for request in server.driver.requests]
    assert a == b != c


async def test_without_keys_nothing_is_asked_for(given: Start) -> None:
    server = await given(*ANSWER)
    await ask(server, "whatever", cache_salt="s", priority=-3)
    (request,) = server.driver.requests
    assert (request.tenant, request.salt, request.priority) == ("", "s", -3)


async def test_a_key_bounds_length_and_priority(given: Start, tmp_path: Path) -> None:
    lines = [line("low", "l", max_tokens=50, priority=5), line("any", "a"), line("high", "h", priority=-5)]
    server = await given(*ANSWER, access=access(tmp_path, *lines))
    for key, more, param in (
        ("l", {"max_tokens": 51}, "max_tokens"),
        ("l", {"min_tokens": 51, "max_tokens": 60}, "min_tokens"),
        ("l", {"priority": 4}, "priority"),
        ("h", {"priority": -6}, "priority"),
    ):
        refused = await ask(server, key, **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    asked = [("l", {}), ("l", {"priority": 9}), ("a", {}), ("a", {"priority": -9}), ("h", {}), ("h", {"priority": -5})]
    for key, more in asked:
        assert (await ask(server, key, **more)).status_code == 200
    assert [request.priority for request in server.driver.requests] == [5, 9, 0, -9, 0, -5]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    await server.client.post("/v1/chat/completions", json=chat, headers=by("l"))
    assert server.driver.requests[-1].max_tokens == 50
    newer = await server.client.post("/v1/chat/completions", json=chat | {"max_completion_tokens": 60}, headers=by("l"))
    assert newer.json()["error"]["param"] == "max_completion_tokens"


async def test_requests_at_once_are_counted_until_they_end_however_they_end(given: Start, tmp_path: Path) -> None:
    go = asyncio.Event()
    server = await given(b"a", go, *ANSWER, access=access(tmp_path, line("one", "1", requests=1), line("free", "f")))
    running = asyncio.create_task(ask(server, "1", stream=True))
    await until(lambda: server.driver.sessions == 1)
    refused = await ask(server, "1")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    other = asyncio.create_task(ask(server, "f"))
    await until(lambda: server.driver.sessions == 2)
    go.set()
    assert ((await running).status_code, (await other).status_code) == (200, 200)
    assert (await ask(server, "1", temperature=-1)).status_code == 400
    assert (await ask(server, "1")).status_code == 200
    go.clear()
    leaving = asyncio.create_task(ask(server, "1"))
    await until(lambda: server.driver.sessions == 1)
    leaving.cancel()
    await until(lambda: server.driver.sessions == 0)
    go.set()
    assert (await ask(server, "1")).status_code == 200


async def test_limits_by_the_minute_are_told_as_openai_tells_them(given: Start, tmp_path: Path) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 1000}
    server = await given(*ANSWER, access=access(tmp_path, line("few", "f", **limits)))
    first = await ask(server, "f")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert 900 < int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert (await ask(server, "f", stream=True)).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await ask(server, "f")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(server.driver.requests) == 2


async def test_tokens_of_answers_are_paid_for_when_they_are_made(given: Start, tmp_path: Path) -> None:
    server = await given(
        b"x" * 100, Finish("length", 0), access=access(tmp_path, line("few", "f", tokens_per_minute=60))
    )
    assert (await ask(server, "f", max_tokens=100)).status_code == 200
    refused = await ask(server, "f")
    assert refused.status_code == 429
    assert "tokens a minute" in refused.json()["error"]["message"]
