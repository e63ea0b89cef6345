"""The frontend process before real workers with the scripted engine, over an emulated WAN."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from openai import APIError, APIStatusError, AsyncOpenAI
from tokenizers import Tokenizer

from pdd_runtime.discovery import RegistryServer
from pdd_runtime.graph import loads
from pdd_runtime.ids import new_id
from pdd_runtime.rpc import Greeting, RpcServer
from pdd_runtime.testing.byte_tokenizer import byte_tokenizer
from pdd_runtime.worker.lifetime import race
from tests.waiting import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "only-for-tests"
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: frontend-tests}
spec:
  model: {source: toy}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 50Mbit/s, rtt: 20ms, streams: 2, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: {plugin: scripted, config: &engine {token_time: 0.004}}}
    relay: {role: relay, cluster: dc-a, engine: {plugin: scripted, config: *engine}}
    main: {role: main, cluster: dc-b, engine: {plugin: scripted, config: *engine}}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
  routing: {plugin: always-relay}
  handoff: {plugin: catch-up, config: {threshold: 4, min_relay_tokens: 8}}
  frontend: {port: 0}
"""
WORKERS = ("prefill", "relay", "main")
HELLO: Any = [{"role": "user", "content": "hello"}]


class Fleet:
    """The processes of one graph; the registry is in this process."""

    def __init__(self, directory: Path, *overrides: str, graph: str = GRAPH) -> None:
        self.graph = loads(graph, overrides).graph
        self.directory = directory
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.url = ""

    async def start(self, *names: str) -> None:
        """`frontend`, and pools by name; returns when all of them are ready members."""
        greeting = Greeting(graph=self.graph.name, secret=SECRET, cluster="dc-a", name="launcher")
        self._server = RpcServer(greeting)
        self._registry = RegistryServer(self._server)
        self.address = await self._server.start("127.0.0.1")
        for name in names:
            await self.spawn(name)
        for name in names:
            await self.member(name)

    async def spawn(self, name: str, *options: str) -> asyncio.subprocess.Process:
        path = self.directory / "graph.json"
        path.write_text(self.graph.model_dump_json(by_alias=True))
        what = (
            ["pdd_runtime.frontend"] if name == "frontend" else ["pdd_runtime.worker", "--pool", name, "--index", "0"]
        )
        with self.log(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *what, "--graph", str(path)),
                *("--epoch", new_id("epoch"), "--discovery", self.address, *options),
                stdin=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PDD_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    async def member(self, name: str) -> None:
        """Return when it is registered and ready."""

        async def registered() -> None:
            while True:
                version = self._registry.version
                for member in self._registry.members():
                    if member.key.pool == name and member.state == "ready":
                        if name == "frontend":
                            self.url = member.endpoint
                        return
                await self._registry.changed(version)

        await self._while_they_run(registered())

    async def says(self, name: str, what: str) -> None:
        """Return when its log has that."""

        async def said() -> None:
            while what not in self.log(name).read_text():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)

        await self._while_they_run(said())

    async def end(self, name: str, number: signal.Signals) -> int:
        """Send a signal; returns the exit code."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return await process.wait()

    async def close(self) -> None:
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        # One that is still starting ends when it has come far enough to look.
        for process in self.processes.values():
            await process.wait()
        self._registry.close()
        await self._server.close()

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as client:
            return await client.get(path)

    async def until_ready(self) -> None:
        async def ready() -> None:
            while (await self.get("/ready")).status_code != 200:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)

        await self._while_they_run(ready())

    async def _while_they_run(self, awaited: Coroutine[Any, Any, None]) -> None:
        """Return when that is done, however slow the machine is. Raises where a process ends before."""
        names = [*self.processes]
        first = await race(awaited, *(self.processes[name].wait() for name in names))
        if first != 0:
            name = names[first - 1]
            raise AssertionError(f"{name} has ended: {self.log(name).read_text()}")

    async def until_idle(self) -> None:
        """Until no session is left and no worker holds a block."""
        async with asyncio.timeout(PATIENCE):
            while True:
                workers = (await self.get("/pdd/workers")).json()["workers"]
                held = [w["load"]["blocks_used"] + w["load"]["sessions"] for w in workers]
                if not any(held) and "pdd_sessions 0.0" in (await self.get("/metrics")).text:
                    return
                await asyncio.sleep(0.02)

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One for all tests that leave it as it was."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        await fleet.start("frontend", *WORKERS)
        await fleet.until_ready()
        yield fleet
    finally:
        await fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def own_fleet(tmp_path: Path) -> AsyncIterator[Callable[..., Fleet]]:
    """Makes fleets that a test may break; they are closed behind it."""
    fleets: list[Fleet] = []

    def make(*overrides: str, graph: str = GRAPH) -> Fleet:
        directory = tmp_path / str(len(fleets))
        directory.mkdir()
        fleets.append(Fleet(directory, *overrides, graph=graph))
        return fleets[-1]

    yield make
    for fleet in fleets:
        await fleet.close()


async def test_the_openai_client_streams_sixteen_at_once_what_it_gets_whole(fleet: Fleet) -> None:
    async with fleet.openai() as client:

        async def both(number: int) -> None:
            messages: Any = [{"role": "user", "content": f"question {number}"}]
            stream = await client.chat.completions.create(
                model="toy", messages=messages, temperature=0, max_tokens=40, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            text, usage, reason = "", None, None
            async for chunk in stream:
                usage = chunk.usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
            whole = await client.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=40)
            assert whole.choices[0].message.content == text
            assert (len(text), reason, whole.choices[0].finish_reason) == (40, "length", "length")
            assert usage is not None
            assert whole.usage is not None
            assert (usage.completion_tokens, usage.prompt_tokens) == (40, whole.usage.prompt_tokens)

        async with asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(both(number))


async def test_a_second_turn_says_what_was_cached(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        turn: Any = [{"role": "user", "content": "what was said before " * 20}]
        cached = []
        for _ in range(2):
            answer = await client.chat.completions.create(model="toy", messages=turn, max_tokens=20, temperature=0)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            turn += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "go on"},
            ]
            prompt = answer.usage.prompt_tokens
    assert cached[0] == 0
    assert 400 < (cached[1] or 0) < prompt


async def test_text_and_its_token_ids_get_the_same_answer(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        text = "naïve 🎉"
        prompts: Any = [text, list(text.encode()), [text, "b"], [list(text.encode()), [98]]]
        answers = [
            await client.completions.create(model="toy", prompt=prompt, max_tokens=12, temperature=0)
            for prompt in prompts
        ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert [choice.text for choice in answers[2].choices] == [choice.text for choice in answers[3].choices]


async def test_a_seed_makes_the_answer_the_same_again(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        answers = [
            await client.completions.create(model="toy", prompt="x", max_tokens=24, temperature=0.8, seed=seed)
            for seed in (1, 1, 2)
        ]
    texts = [answer.choices[0].text for answer in answers]
    assert texts[0] == texts[1] != texts[2]


async def test_every_token_has_one_logprob_over_the_handoff(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        stream = await client.chat.completions.create(
            model="toy", messages=HELLO, max_tokens=50, temperature=0, logprobs=True, top_logprobs=2, stream=True
        )
        text, entries = "", []
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            logprobs = chunk.choices[0].logprobs
            entries += (logprobs.content or []) if logprobs else []
    assert len(entries) == 50
    assert "".join(entry.token for entry in entries) == text
    assert bytes(byte for entry in entries for byte in entry.bytes or []) == text.encode()
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_a_stop_string_is_found_at_every_place_around_the_handoff(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        whole = await client.chat.completions.create(model="toy", messages=HELLO, max_tokens=40, temperature=0)
        text = whole.choices[0].message.content or ""

        async def stopped(at: int) -> None:
            stop = text[at : at + 5]
            answer = await client.chat.completions.create(
                model="toy", messages=HELLO, max_tokens=40, temperature=0, stop=stop, logprobs=True
            )
            assert answer.choices[0].message.content == text[: text.index(stop)]
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == text.index(stop) + 5
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert len(logprobs.content or []) == text.index(stop)

        async with asyncio.TaskGroup() as group:
            for at in range(1, 24):
                group.create_task(stopped(at))
    await fleet.until_idle()


async def test_a_stop_string_shows_on_the_timeline_as_a_stop(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        whole = await client.completions.create(model="toy", prompt="abc", max_tokens=20, temperature=0)
        raw = await client.completions.with_raw_response.create(
            model="toy", prompt="abc", max_tokens=20, temperature=0, stop=whole.choices[0].text[10:13]
        )
    timeline = (await fleet.get(f"/pdd/requests/{raw.headers['x-pdd-request-id']}")).json()
    assert (timeline["finish_reason"], timeline["error"]) == ("stop", None)


async def test_the_timeline_is_found_by_the_responses_id(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(model="toy", messages=HELLO, max_tokens=30)
    request_id = raw.headers["x-pdd-request-id"]
    timeline = (await fleet.get(f"/pdd/requests/{request_id}")).json()
    assert (timeline["id"], timeline["route"], timeline["finish_reason"]) == (request_id, "P-RLD-MD", "length")
    assert sum(timeline["tokens"].values()) == 30
    recent = (await fleet.get("/pdd/requests")).json()["requests"]
    assert (recent[0]["id"], recent[0]["status"], recent[0]["tokens"]) == (request_id, 200, 30)


async def test_models_and_metrics_are_there(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert (await client.models.retrieve("toy")).id == "toy"
        await client.completions.create(model="toy", prompt="count me", max_tokens=400)
    await fleet.until_idle()
    text = (await fleet.get("/metrics")).text
    for name in (
        'pdd_requests_total{route="P-RLD-MD",status="200"}',
        'pdd_ttft_seconds_count{route="P-RLD-MD"}',
        'pdd_tenth_token_seconds_count{route="P-RLD-MD"}',
        'pdd_tpot_seconds_count{route="P-RLD-MD"}',
        'pdd_longest_gap_seconds_count{route="P-RLD-MD"}',
        'pdd_e2e_seconds_count{route="P-RLD-MD"}',
        'pdd_tokens_total{tier="relay"}',
        'pdd_tokens_total{tier="main"}',
        'pdd_kv_bytes_total{edge="prefill->main"}',
        "pdd_handoff_gap_seconds_count",
        "pdd_sessions",
    ):
        assert name in text


async def test_wrong_requests_reach_the_client_as_its_own_error_types(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        for status, wrong in (
            (404, {"model": "gpt-9"}),
            (400, {"temperature": -1}),
            (400, {"max_tokens": 10_000}),
            (400, {"n": 0}),
        ):
            with pytest.raises(APIStatusError) as raised:
                await client.chat.completions.create(**({"model": "toy", "messages": HELLO} | wrong))
            assert raised.value.status_code == status
            assert raised.value.response.headers["x-pdd-request-id"].startswith("req-")
            assert raised.value.param in wrong


async def test_a_prompt_as_long_as_the_context_allows_is_answered(fleet: Fleet) -> None:
    async with fleet.openai() as client:
        answer = await client.completions.create(model="toy", prompt="long " * 1636, max_tokens=12, temperature=0)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8180, 12)
        with pytest.raises(APIStatusError, match="8192"):
            await client.completions.create(model="toy", prompt="long " * 1640)


async def ask(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A completions request over a bare socket."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0.0, 0.02, 0.1, 0.3])
async def test_a_client_that_leaves_frees_everything_before_the_answer_would_have_ended(
    fleet: Fleet, stream: bool, after: float
) -> None:
    prompt = f"{stream} {after} " * 200
    _, writer = await ask(fleet.url, {"prompt": prompt, "max_tokens": 6000, "stream": stream})
    await asyncio.sleep(after)
    writer.transport.abort()
    async with asyncio.timeout(20):  # the tokens alone would take 24 s
        await fleet.until_idle()


async def test_any_bytes_at_all_stream_as_the_tokenizer_decodes_them(own_fleet: Callable[..., Fleet]) -> None:
    fleet = own_fleet(*(f"spec.pools.{pool}.engine.config.alphabet=bytes" for pool in WORKERS))
    await fleet.start("frontend", *WORKERS)
    await fleet.until_ready()
    tokenizer = Tokenizer.from_str(byte_tokenizer().tokenizer_json)
    async with fleet.openai() as client:
        for number in range(8):
            stream = await client.completions.create(
                model="toy", prompt=f"p{number}", max_tokens=60, temperature=0, stream=True,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            text, ids = "", []
            async for chunk in stream:
                text += chunk.choices[0].text
                ids += (chunk.choices[0].model_extra or {}).get("token_ids", [])
            assert len(ids) == 60
            assert text == tokenizer.decode(ids)


async def test_workers_that_are_killed_and_not_followed_are_an_error_event_and_no_done(
    own_fleet: Callable[..., Fleet],
) -> None:
    fleet = own_fleet("spec.recovery.wait=1s")
    await fleet.start("frontend", *WORKERS)
    await fleet.until_ready()
    async with fleet.openai() as client:
        stream = await client.completions.create(model="toy", prompt="x", max_tokens=4000, stream=True)

        async def read() -> None:
            got = 0
            async for chunk in stream:
                got += len(chunk.choices[0].text)
                if got > 50 and "main" in fleet.processes:
                    await fleet.end("main", signal.SIGKILL)
                    await fleet.end("relay", signal.SIGKILL)

        with pytest.raises(APIError, match=r"main|relay"):
            await read()
        assert (await fleet.get("/ready")).status_code == 503
        with pytest.raises(APIStatusError) as raised:
            await client.completions.create(model="toy", prompt="x")
        assert raised.value.status_code == 503
    assert (await fleet.get("/health")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("order", list(itertools.permutations(WORKERS)))
async def test_it_is_ready_only_with_the_last_tier_in_whatever_order(
    own_fleet: Callable[..., Fleet], order: tuple[str, ...]
) -> None:
    fleet = own_fleet()
    await fleet.start("frontend")
    async with fleet.openai() as client:
        for pool in order:
            assert (await fleet.get("/health")).status_code == 200
            ready = await fleet.get("/ready")
            assert ready.status_code == 503
            assert pool in ready.json()["error"]["message"]
            with pytest.raises(APIStatusError) as raised:
                await client.completions.create(model="toy", prompt="x")
            assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "1")
            await fleet.spawn(pool)
            await fleet.member(pool)
        await fleet.until_ready()
        assert (await client.completions.create(model="toy", prompt="x")).choices[0].text


async def test_a_stop_lets_a_running_answer_end(own_fleet: Callable[..., Fleet]) -> None:
    fleet = own_fleet()
    await fleet.start("frontend", *WORKERS)
    await fleet.until_ready()
    async with fleet.openai() as client:
        stream = await client.completions.create(model="toy", prompt="x", max_tokens=150, stream=True)
        chunks = aiter(stream)
        text = (await anext(chunks)).choices[0].text
        stopping = asyncio.create_task(fleet.end("frontend", signal.SIGTERM))
        reason = None
        async for chunk in chunks:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        assert (len(text), reason) == (150, "length")
    assert await stopping == 0


async def test_it_ends_with_its_parent_and_tells_its_clients(own_fleet: Callable[..., Fleet]) -> None:
    fleet = own_fleet()
    await fleet.start("frontend", *WORKERS)
    await fleet.until_ready()
    process = fleet.processes["frontend"]
    async with fleet.openai() as client:
        stream = await client.completions.create(model="toy", prompt="x", max_tokens=8000, stream=True)

        async def read() -> None:
            async for _ in stream:
                if process.stdin is not None and not process.stdin.is_closing():
                    process.stdin.close()

        with pytest.raises(APIError, match="frontend stops"):
            await read()
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 0


async def test_a_port_in_use_ends_it_with_a_way_out(own_fleet: Callable[..., Fleet]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fleet = own_fleet(f"spec.frontend.port={port}")
        await fleet.start()
        process = await fleet.spawn("frontend")
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 3
    said = fleet.log("frontend").read_text()
    assert f"127.0.0.1:{port}" in said
    assert "--set spec.frontend.port=" in said
    assert "Traceback" not in said


async def test_it_says_who_it_is_to_discovery(fleet: Fleet) -> None:
    members = [member for member in fleet._registry.members() if member.role == "frontend"]
    assert [(member.endpoint, member.cluster, member.pid) for member in members] == [
        (fleet.url, "dc-a", fleet.processes["frontend"].pid)
    ]


@pytest.mark.slow
@pytest.mark.model
async def test_a_real_model_is_heard_as_it_speaks(own_fleet: Callable[..., Fleet]) -> None:
    graphs = Path(__file__).parents[2] / "graphs"
    fleet = own_fleet("spec.frontend.port=0", graph=(graphs / "aggregated.yaml").read_text())
    await fleet.start("frontend", "main")
    await fleet.until_ready()
    async with fleet.openai() as client:
        for question in ("Reply with three emoji.", "用中文说一句话。", "Write a Python function that adds."):
            asked: dict[str, Any] = {
                "model": "smollm2",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": 24,
            }
            stream = await client.chat.completions.create(**asked, stream=True, logprobs=True)
            pieces: list[str] = []
            entries: list[Any] = []
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                logprobs = chunk.choices[0].logprobs
                entries += (logprobs.content or []) if logprobs else []
            whole = await client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == "".join(pieces)
            assert whole.usage is not None
            assert len(entries) == whole.usage.completion_tokens
            end = whole.choices[0].finish_reason == "stop"
            spelled = b"".join(bytes(entry.bytes or []) for entry in (entries[:-1] if end else entries))
            assert spelled.decode(errors="replace") == "".join(pieces)


LACKING: list[tuple[str, dict[str, Any]]] = [
    ("penalties", {"frequency_penalty": 0.5}),
    ("logit_bias", {"logit_bias": {"65": 1}}),
    ("min_tokens", {"min_tokens": 2}),
    ("logprobs", {"logprobs": 1}),
    ("guided", {"guided_regex": "a"}),
]


async def test_what_the_relay_cannot_do_goes_without_it_and_the_timeline_says_so(
    own_fleet: Callable[..., Fleet],
) -> None:
    claims = [f"spec.pools.{pool}.engine.config={{claims: [guided]}}" for pool in ("prefill", "main")]
    lacks = "spec.pools.relay.engine.config={lacks: [penalties, logit_bias, min_tokens, logprobs]}"
    fleet = own_fleet(lacks, *claims)
    await fleet.start("frontend", *WORKERS)
    await fleet.until_ready()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE) as client:
        for capability, change in [("", {}), *LACKING]:
            body = {"prompt": "hello", "max_tokens": 4, "seed": 1} | change
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            timeline = (await client.get(f"/pdd/requests/{response.headers['x-pdd-request-id']}")).json()
            assert timeline["route"] == ("P-MD" if capability else "P-RLD-MD")
            assert not capability or f"relay cannot: {capability}" in timeline["reason"]
