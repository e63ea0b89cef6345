"""Variants of a running graph, brought up and steered by the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from pdd_runtime.clock import now
from tests.waiting import PATIENCE, until

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: variants}
spec:
  model: {source: toy}
  clusters: {dc: {}}
  pools:
    a: {role: aggregated, cluster: dc, engine: {plugin: scripted, config: {token_time: 0.01, batch_limit: 64}}}
    b: {role: aggregated, cluster: dc, engine: {plugin: scripted, config: {token_time: 0.01, batch_limit: 64}}}
    c: {role: aggregated, cluster: dc, engine: {plugin: scripted, config: {token_time: 0.1, batch_limit: 64}}}
  variants:
    plain: {weight: 1, pools: [a]}
    other: {weight: 1, pools: [b]}
    slow: {weight: 0, pools: [c]}
  experiment:
    sticky: [header x-session, user, conversation]
    guardrails: {requests: 30, window: 40s, confidence: 0.99}
  frontend: {port: 0, replicas: 2}
"""
LONG = 3 * PATIENCE
"""Seconds for what takes a process or two to be started."""
TOKENS = 12

pytestmark = pytest.mark.timeout(300)


class Answered(NamedTuple):
    variant: str
    tokens: list[int]
    asked: float


class Running:
    http: httpx.AsyncClient

    def __init__(self, state: Path) -> None:
        self.file = state / "variants.yaml"
        self.file.write_text(GRAPH)
        self.env = {**os.environ, "PDD_STATE_DIR": str(state)}
        self.up()
        self.url = str(self.frontends()[0]["endpoint"])

    def cli(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "pdd_runtime.cli", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=LONG, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def up(self, *overrides: str) -> None:
        sets = [part for override in overrides for part in ("--set", override)]
        self.cli("up", str(self.file), "-d", "--wait", *sets)

    def get(self, path: str) -> httpx.Response:
        """Over a connection of its own: the kernel chooses which frontend answers."""
        return httpx.get(self.url + path, timeout=LONG, verify=False).raise_for_status()

    async def decide(self, do: str, variant: str | None = None) -> dict[str, Any]:
        """As the commands do it."""
        answer = await self.http.post(f"{self.url}/pdd/variants", json={"do": do, "variant": variant})
        return {each["name"]: each for each in answer.raise_for_status().json()["variants"]}

    def variants(self) -> dict[str, Any]:
        """What is said of each."""
        return {each["name"]: each for each in self.get("/pdd/variants").json()["variants"]}

    async def rolled_back(self, variant: str) -> dict[str, Any]:
        """What is said of it, when that has happened, and both frontends know."""
        async with asyncio.timeout(LONG):
            while True:
                out = await asyncio.to_thread(self.series, "pdd_variant_out", variant, 'by="guardrail"')
                if out == [1.0, 1.0]:
                    break
                await asyncio.sleep(0.2)
        found: dict[str, Any] = (await asyncio.to_thread(self.variants))[variant]
        return found

    def series(self, name: str, variant: str, *labels: str) -> list[float]:
        """Its values, of each frontend."""
        wanted = (f'variant="{variant}"', *labels)
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
        return [float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted)]

    def frontends(self) -> list[dict[str, Any]]:
        rows = json.loads(self.cli("ps", "variants", "--format", "json"))
        return [row for row in rows if row["role"] == "frontend"]

    def worker(self, pool: str) -> dict[str, Any]:
        rows = json.loads(self.cli("ps", "variants", "--format", "json"))
        return next(row for row in rows if row["pool"] == pool)

    async def ask(self, text: str, **more: Any) -> Answered:
        """Over a connection of its own. The answer must be whole."""
        headers = {f"x-{name}": value for name, value in more.pop("headers", {}).items()}
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0} | more
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        tokens: list[int] = []
        asked = now()
        url = f"{self.url}/v1/chat/completions"
        async with self.http.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            tokens += [id for choice in event["choices"] for id in choice.get("token_ids") or ()]
        return Answered(answer.headers["x-pdd-variant"], tokens, asked)

    async def asks(self, texts: list[str], **more: Any) -> list[Answered]:
        return list(await asyncio.gather(*(self.ask(text, **more) for text in texts)))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    graph = Running(tmp_path_factory.mktemp("variants"))
    yield graph
    graph.cli("down", "variants")


@pytest_asyncio.fixture(autouse=True)
async def as_in_the_file(running: Running) -> AsyncIterator[None]:
    # Connections are not kept.
    async with httpx.AsyncClient(timeout=LONG, verify=False, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        running.http = http
        if any(each["state"] != "running" for each in running.variants().values()):
            await running.decide("resume")
        yield


class Load:
    """Users who ask without a pause, always the same questions, until they are told to stop. What they get is to be
    what one gets who asks alone: no token is lost, doubled or another."""

    def __init__(self, running: Running, users: int = 6) -> None:
        self.answers: list[Answered] = []
        self._running, self._users = running, users
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Load:
        texts = [f"question {number}" for number in range(3 * self._users)]
        alone = await self._running.asks(texts)
        assert all(len(answer.tokens) == TOKENS for answer in alone)
        self._expected = {text: answer.tokens for text, answer in zip(texts, alone, strict=True)}
        self._tasks = [asyncio.create_task(self._user(texts[user :: self._users])) for user in range(self._users)]
        await self.more(self._users)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def more(self, count: int) -> set[str]:
        """The variants of so many more answers, to what is asked from now on."""
        since = now()

        def more() -> list[str]:
            return [answer.variant for answer in self.answers if answer.asked >= since]

        await until(lambda: len(more()) >= count or any(task.done() for task in self._tasks), LONG)
        return set(more())

    async def _user(self, texts: list[str]) -> None:
        while not self._stop.is_set():
            for text in texts:
                answer = await self._running.ask(text)
                assert answer.tokens == self._expected[text], text
                self.answers.append(answer)


async def test_requests_are_split_and_each_says_how(running: Running) -> None:
    answers = await running.asks([f"hello {number}" for number in range(40)])
    counts = Counter(answer.variant for answer in answers)
    assert counts["plain"] + counts["other"] == 40
    assert min(counts.values()) > 6
    listed = running.get("/pdd/requests").json()["requests"]
    assert Counter(line["variant"] for line in listed[:40]) == counts
    timeline = running.get(f"/pdd/requests/{listed[0]['id']}").json()
    assert timeline["variant"] == listed[0]["variant"]
    assert running.series("pdd_variant_share", "other") == [0.5, 0.5]
    for name in ("pdd_requests_total", "pdd_ttft_seconds_count"):
        assert sum(running.series(name, "other")) == counts["other"], name
    assert sum(running.series("pdd_tokens_total", "other")) == TOKENS * counts["other"]


async def test_what_belongs_together_stays_with_one_variant_whichever_frontend_answers(running: Running) -> None:
    turn = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name a river."}]
    later = [*turn, {"role": "assistant", "content": "Rhine"}, {"role": "user", "content": "Another one."}]
    answers = await asyncio.gather(*(running.ask("", messages=each) for each in [turn, later] * 8))
    assert len({answer.variant for answer in answers}) == 1
    # A header counts before the user.
    for more in ({"user": "NAME"}, {"user": "u0", "headers": {"session": "NAME"}}):
        seen = set()
        for name in [f"u{number}" for number in range(10)]:
            named = json.loads(json.dumps(more).replace("NAME", name))
            answers = await running.asks([f"{name} asks {number}" for number in range(3)], **named)
            assert len({answer.variant for answer in answers}) == 1
            seen.add(answers[0].variant)
        assert seen == {"plain", "other"}


async def test_promote_abort_and_resume_under_load_lose_and_double_no_token(running: Running) -> None:
    async with Load(running) as load:
        assert await load.more(20) == {"plain", "other"}
        shares = {name: each["share"] for name, each in (await running.decide("promote", "other")).items()}
        assert shares == {"plain": 0.0, "other": 1.0, "slow": 0.0}
        assert await load.more(20) == {"other"}
        assert (await running.decide("abort"))["other"]["state"] == "abort"
        assert await load.more(20) == {"plain"}
        await running.decide("resume")
        assert await load.more(20) == {"plain", "other"}


async def test_the_commands_say_what_was_decided_and_refuse_what_makes_no_sense(running: Running) -> None:
    running.cli("ab", "promote", "other", "--why", "it is better")
    assert running.variants()["other"]["share"] == 1.0
    shown = running.cli("ab", "status")
    assert "promoted: it gets all requests (operator, " in shown
    assert "it is better" in shown
    body = json.loads(running.cli("ab", "abort", "--format", "json"))
    assert [each["kind"] for each in body["decisions"][-2:]] == ["promote", "abort"]
    assert "no variant 'b'" in running.cli("ab", "promote", "b", code=1)
    for order in (
        {"do": "abort", "variant": "plain"},
        {"do": "rollback", "variant": "other"},
        {"do": "promote"},
        {"do": "abort", "whom": "other"},
    ):
        assert (await running.http.post(f"{running.url}/pdd/variants", json=order)).status_code == 400


async def test_a_variant_whose_workers_are_away_is_rolled_back_and_its_users_do_not_notice(running: Running) -> None:
    worker = running.worker("b")["pid"]
    async with Load(running) as load:
        os.kill(worker, signal.SIGSTOP)
        try:
            found = await running.rolled_back("other")
            assert await load.more(20) == {"plain"}
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)
    assert found["elsewhere"] > 0
    assert "(guardrail, " in found["why"]
    assert "requests failed" in found["why"]
    assert "rolled back" in running.cli("logs", "frontend", "-n", "100000")

    # Nor is it forgotten when the frontends begin anew.
    before = {row["pid"] for row in running.frontends()}
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    def anew() -> bool:
        rows = running.frontends()
        return len(rows) == 2 and all(row["state"] == "ready" and row["pid"] not in before for row in rows)

    await until(anew, LONG)
    assert running.variants()["other"]["why"] == found["why"]
    assert {answer.variant for answer in await running.asks([f"again {number}" for number in range(16)])} == {"plain"}


async def test_other_weights_by_up_move_the_traffic_and_a_variant_that_is_slower_is_rolled_back(
    running: Running,
) -> None:
    async with Load(running) as load:
        assert await load.more(20) == {"plain", "other"}
        await asyncio.to_thread(running.up, "spec.variants.slow.weight=2")
        assert await load.more(20) == {"plain", "other", "slow"}
        found = await running.rolled_back("slow")
        assert await load.more(20) == {"plain", "other"}
    assert "P90 of the time" in found["why"]
    assert found["failed"] == 0
    assert running.variants()["other"]["state"] == "running"
