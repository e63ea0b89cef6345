"""The HTTP API over a PDD graph, handed off behind every token: the answer is that of the run without a relay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdd_runtime.frontend.app import create_app
from pdd_runtime.frontend.requests import Body, ChatRequest, CompletionRequest
from pdd_runtime.frontend.service import Service
from tests.integration.stack import Stack

MESSAGES = [{"role": "user", "content": "Hello there"}]
LETTERS = {str(ord(letter)): 40 for letter in "abcdefghijklmnop"}
NO_BLANKS = {str(ord(blank)): -100 for blank in " \t\r\n"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["é", "z🎉"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
SEEDED: dict[str, Any] = {"messages": MESSAGES, "seed": 11, "temperature": 0.9, "max_tokens": 24}
EITHER: dict[str, Any] = SEEDED | {
    "max_tokens": 120,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
    "parallel_tool_calls": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "json": SEEDED
    | {
        "max_tokens": 60,
        "logit_bias": NO_BLANKS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
    },
    "tool call": SEEDED
    | {
        "max_tokens": 80,
        "logit_bias": NO_BLANKS,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "call, or form": EITHER | {"logit_bias": NO_BLANKS | {"60": 100}},
    "form, or call": EITHER | {"logit_bias": NO_BLANKS | {"60": -100}},
    "multi-byte": SEEDED | {"guided_regex": "(é|漢|🎉|a){7}"},
    "stop text": SEEDED | {"logit_bias": LETTERS},
    "penalties": SEEDED
    | {
        "logit_bias": LETTERS,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "min_tokens": 20,
    },
    "logprobs": SEEDED | {"logprobs": True, "top_logprobs": 3, "ignore_eos": True, "n": 2},
}
"""To what is asked, by name. Random weights write noise, so forms and biases see to it that the text is of its kind."""


@pytest.fixture(scope="module")
def stack(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    exact = (f"spec.model.source={tiny}", "spec.model.mode=exact", "spec.links.wan.rtt=4ms")
    with Stack("quickstart-torch", tmp_path_factory.mktemp("state"), *exact) as stack:
        yield stack


@asynccontextmanager
async def api(stack: Stack, *overrides: str) -> AsyncIterator[httpx.AsyncClient]:
    """The frontend in this process, over a driver for a graph changed by `overrides`."""
    async with stack.driver(*overrides) as driver:
        app = create_app(Service(driver, stack.timelines))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://pdd", timeout=60) as client:
            yield client


def handed_off_after(relay_tokens: int) -> tuple[str, str]:
    bounds = f"{{min_relay_tokens: {relay_tokens}, max_relay_tokens: {relay_tokens}}}"
    return "spec.routing={plugin: always-relay}", f"spec.handoff={{plugin: catch-up, config: {bounds}}}"


def timeline(stack: Stack, response: httpx.Response) -> dict[str, Any]:
    found = stack.timelines.get(response.headers["x-pdd-request-id"])
    assert found is not None
    return found.body()


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Any], httpx.Response]:
    """The choices and the usage, without the ids that every answer makes anew."""
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices, usage = response.json()["choices"], response.json()["usage"]
    for choice in choices:
        for call in choice["message"].get("tool_calls", []):
            del call["id"]
    # What was cached depends on who asked before.
    del usage["prompt_tokens_details"]
    return [*choices, usage], response


async def answers(
    stack: Stack, kinds: dict[str, dict[str, Any]], *overrides: str
) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """What is answered to all kinds, asked at once, and the timelines."""
    async with api(stack, *overrides) as client:
        got = await asyncio.gather(*(answer(client, body) for body in kinds.values()))
        return {kind: (said, timeline(stack, response)) for kind, (said, response) in zip(kinds, got, strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_handoff_behind_any_token_changes_no_answer(stack: Stack) -> None:
    never = "spec.routing={plugin: never-relay}"
    kinds = dict(KINDS)
    text = (await answers(stack, {"stop text": kinds["stop text"]}, never))["stop text"][0][0]["message"]["content"]
    kinds["stop text"] = kinds["stop text"] | {"stop": text[10:14]}
    expected = await answers(stack, kinds, never)
    assert all(found["route"] == "P-MD" for _, found in expected.values())
    _check_kinds({kind: said for kind, (said, _) in expected.items()}, text)
    # Of one choice, and with the tokens of the stop text: so the seam comes to lie inside it, too.
    lengths = {kind: usage["completion_tokens"] // len(choices) for kind, ([*choices, usage], _) in expected.items()}
    assert lengths["stop text"] >= len(expected["stop text"][0][0]["message"]["content"]) + 4

    # Some at once: a driver waits more than it computes.
    places = asyncio.Semaphore(6)

    async def handed_off_behind(relay_tokens: int) -> None:
        # Only those whose answer is not over by then: with two tokens behind the relay's, one is main's.
        asked = {kind: body for kind, body in kinds.items() if relay_tokens < lengths[kind] - 1}
        async with places:
            got = await answers(stack, asked, *handed_off_after(relay_tokens))
        for kind, (said, found) in got.items():
            assert said == expected[kind][0], (kind, relay_tokens)
            assert (found["route"], found["tokens"]["relay"]) == ("P-RLD-MD", relay_tokens), kind
            assert found["tokens"]["main"] > 0, (kind, relay_tokens)

    async with asyncio.TaskGroup() as group:
        for relay_tokens in range(1, max(lengths.values()) - 1):
            group.create_task(handed_off_behind(relay_tokens))


def _check_kinds(said: dict[str, list[Any]], text: str) -> None:
    """The runs to compare with are what they should be."""
    first = {kind: choices[0] for kind, choices in said.items()}
    thing = json.loads(first["json"]["message"]["content"])
    assert thing["a"] in ("é", "z🎉")
    assert first["json"]["finish_reason"] == "stop"
    for kind in ("tool call", "call, or form"):
        call = first[kind]["message"]["tool_calls"][0]["function"]
        assert (call["name"], set(json.loads(call["arguments"]))) == ("f", {"a", "n"})
        assert first[kind]["finish_reason"] == "tool_calls"
    assert set(json.loads(first["form, or call"]["message"]["content"])) == {"a", "n"}
    assert first["form, or call"]["finish_reason"] == "stop"
    assert set("é漢🎉") & set(first["multi-byte"]["message"]["content"])
    assert first["stop text"]["message"]["content"] == text[: text.find(text[10:14])]
    assert first["stop text"]["finish_reason"] == "stop"
    assert len(first["penalties"]["message"]["content"]) >= 20
    assert first["penalties"]["message"]["content"] != text
    assert [len(choice["logprobs"]["content"]) for choice in said["logprobs"][:-1]] == [24, 24]
    assert all(len(entry["top_logprobs"]) == 3 for entry in first["logprobs"]["logprobs"]["content"])


API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES: dict[str, type[Body]] = {"chat": ChatRequest, "completions": CompletionRequest}
PLAIN: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES, "max_tokens": 6, "seed": 3},
    "completions": {"prompt": "Hello there", "max_tokens": 6, "seed": 3},
}
TOOLS = {"tools": KINDS["tool call"]["tools"]}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES],
    "prompt": ["Hello", "Hi"],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 5,
    "n": 2,
    "echo": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "repetition_penalty": 1.2,
    "logit_bias": {"101": 5},
    "seed": 4,
    "stop": ["e"],
    "stop_token_ids": [101],
    "ignore_eos": True,
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": TOOLS,
    "tool_choice": TOOLS | {"tool_choice": "required", "max_tokens": 30},
    "parallel_tool_calls": TOOLS | {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 30},
    "response_format": {"type": "json_object"},
    "guided_json": SCHEMA,
    "guided_regex": "[a-z]{6}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a" | "bc"',
    "structured_outputs": {"regex": "[0-9]+"},
    "chat_template_kwargs": {"enable_thinking": False},
    "stream": True,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "return_token_ids": True,
    "single": True,
    "cache_salt": "mine",
    "priority": 3,
    "timeout": 60,
    "user": "me",
    "strict": True,
}
"""A value of each field, or an object with the field and those that it needs beside it."""
REFUSED: dict[str, Any] = {"suffix": "x", "functions": [{"name": "f"}], "function_call": {"name": "f"}}
"""Of the others, true and 2 are refused."""


def documented() -> dict[tuple[str, str], str]:
    """The status of each field by endpoint, from the table."""
    found: dict[tuple[str, str], str] = {}
    for line in API.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[1] in ("chat", "completions", "both"):
            for endpoint in PATHS if cells[1] == "both" else (cells[1],):
                found[cells[0].strip("`"), endpoint] = cells[3]
    return found


def asking(field: str, endpoint: str) -> dict[str, Any]:
    value = ASKED.get(field, {"chat": True, "completions": 2}[endpoint])
    return PLAIN[endpoint] | (value if isinstance(value, dict) and field in value else {field: value})


def comparable(response: httpx.Response) -> list[Any]:
    """What was answered, without what differs from answer to answer."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert done == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        return [text, choices[-1]["finish_reason"]]
    choices = response.json()["choices"]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return list(choices)


def test_the_table_of_fields_has_them_all() -> None:
    table = documented()
    for endpoint, body in BODIES.items():
        works = {field for (field, of), status in table.items() if of == endpoint and status.startswith("works")}
        refused = {field for (field, of), status in table.items() if of == endpoint and status == "refused"}
        assert works == set(body.model_fields)
        assert refused == set(body.refused)


@pytest.mark.slow
async def test_every_field_of_the_table_works_on_both_routes_or_is_refused(stack: Stack) -> None:
    table = documented()
    works = [key for key, status in table.items() if status.startswith("works")]
    said: dict[str, list[list[Any]]] = {}
    for route, overrides in (
        ("P-MD", ("spec.routing={plugin: never-relay}",)),
        ("P-RLD-MD", handed_off_after(1)),
    ):
        async with api(stack, *overrides) as client:
            limit = asyncio.Semaphore(8)

            async def ask(field: str, endpoint: str, client: httpx.AsyncClient, limit: asyncio.Semaphore) -> Any:
                async with limit:
                    return await client.post(PATHS[endpoint], json=asking(field, endpoint))

            responses = await asyncio.gather(*(ask(*key, client, limit) for key in works))
            for key, response in zip(works, responses, strict=True):
                assert response.status_code == 200, (key, response.text)
                assert timeline(stack, response)["route"] == route, key
            said[route] = [comparable(response) for response in responses]
            for field, endpoint in table.keys() - set(works):
                wrong = PLAIN[endpoint] | {field: REFUSED.get(field, True if field == "echo" else 2)}
                response = await client.post(PATHS[endpoint], json=wrong)
                assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    for key, one, other in zip(works, said["P-MD"], said["P-RLD-MD"], strict=True):
        assert one == other, key


@pytest.mark.slow
async def test_a_prompt_that_nobody_has_sent_has_nothing_cached_on_either_route(stack: Stack) -> None:
    for route, overrides in (("P-MD", ("spec.routing={plugin: never-relay}",)), ("P-RLD-MD", handed_off_after(1))):
        async with api(stack, *overrides) as client:
            for n in (1, 3):
                body = {"prompt": f"{route} {n} " + "word " * 20, "max_tokens": 6, "n": n, "ignore_eos": True}
                cold, warm = [await client.post("/v1/completions", json=body) for _ in range(2)]
                assert timeline(stack, cold)["route"] == timeline(stack, warm)["route"] == route
                usages = [response.json()["usage"] for response in (cold, warm)]
                assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0
                # All but the last token, which must be computed again to go on from it.
                tokens = usages[1]["prompt_tokens"]
                assert tokens - 16 <= usages[1]["prompt_tokens_details"]["cached_tokens"] < tokens
                assert usages[0]["completion_tokens"] == 6 * n


async def check_that_choices_move_kv_once(stack: Stack) -> None:
    for route, overrides in (("P-MD", ("spec.routing={plugin: never-relay}",)), ("P-RLD-MD", handed_off_after(3))):
        async with api(stack, *overrides) as client:
            moved: list[int] = []
            for n in (1, 3):
                prompt = [32 + (5 * i + 7 * n + len(route)) % 90 for i in range(200)]
                body = {"prompt": prompt, "max_tokens": 12, "n": n, "ignore_eos": True}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                request_id = response.headers["x-pdd-request-id"]
                found = [stack.timelines.get(f"{request_id}-{i}" if i else request_id) for i in range(n)]
                bodies = [one.body() for one in found if one is not None]
                assert [body["route"] for body in bodies] == [route] * n
                assert [body["cached"]["prefill"] for body in bodies] == [0] + [199] * (n - 1)
                moved.append(sum(kv["bytes"] for body in bodies for kv in body["kv"] if kv["edge"] == "prefill->main"))
            assert moved[0] == moved[1] > 0


async def test_choices_of_a_cold_prompt_move_its_kv_once(stack: Stack) -> None:
    await check_that_choices_move_kv_once(stack)


@pytest.mark.slow
async def test_choices_of_a_cold_prompt_move_its_kv_once_to_one_of_several(tiny: Path, tmp_path: Path) -> None:
    two = [f"spec.pools.{pool}.replicas=2" for pool in ("prefill", "relay", "main")]
    with Stack("quickstart-torch", tmp_path, f"spec.model.source={tiny}", "spec.links.wan.rtt=4ms", *two) as stack:
        await check_that_choices_move_kv_once(stack)
