"""What the front adds to an engine: CPU per streamed token and time to the first token.

    python bench/front.py [--streams 1,16,64,256] [--repeats 3] [--replicas 1] [--format text|json]

`pdd-runtime up` starts a frontend and one worker with the scripted engine, which makes a token for every stream in one
step, as engines do that batch continuously, and a step every `--token-time` seconds. A load generator on raw sockets,
in a process of its own, keeps so many streams open at once. Then:

- CPU microseconds per token, of the frontend (HTTP, driver, the message plane's client side) and of the worker. What
  the engine itself costs is measured by running it alone, without frontend or message plane, in this process; the
  worker's figure less that is the message plane's serving side.
- The same for a bare forwarder: a process that reads as many small messages from one connection, those of a step at
  once, and writes each to the connection of its stream, with uvloop and nothing else. What it takes is the cost of
  waking up and of a system call for each stream on this machine at this moment; nothing that has many clients is
  cheaper.
- Added time to the first token at one stream: through HTTP, less a direct call to the worker over the message plane,
  in turn.

Figures are medians over the repeats. CPU is the kernel's own count of run time, in ns, of all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from pdd_runtime.plugins.engine import DecodeEvent, DecodeRequest, ModelSpec, Sampling, Tokens
from pdd_runtime.rpc import Greeting, connect
from pdd_runtime.testing.engine_harness import StoreHost
from pdd_runtime.testing.scripted import ScriptedEngine

CPU_TARGET, TTFT_TARGET = 60.0, 3.0
"""us of CPU per token for frontend, driver and both ends of the message plane; ms at one stream."""
PROMPT = 64
IDLE = 4.0
"""Seconds to look at an idle frontend."""
MESSAGE = 60
"""Bytes of a token on the message plane, about."""
NAME = "front-bench"
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {{name: front-bench}}
spec:
  model: {{source: toy}}
  clusters: {{dc: {{}}}}
  pools:
    main: {{role: aggregated, cluster: dc, engine: {{plugin: scripted, config: {config}}}}}
  frontend: {frontend}
"""


# The load generator


class Stream(asyncio.Protocol):
    """One connection, one answer at a time. Looks at the bytes as little as it can."""

    def __init__(self) -> None:
        self.events = self.writes = 0
        self.first: float | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, request: bytes) -> float:
        """Returns the seconds to the first event; when the answer has ended."""
        self._done = asyncio.get_running_loop().create_future()
        self.first, begun = None, time.perf_counter()
        self._transport.write(request)
        await self._done
        assert self.first is not None
        return self.first - begun

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        if (events := data.count(b"data: ")) and self.first is None:
            self.first = time.perf_counter()
        self.events += events
        self.writes += 1
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(data.decode()))
        elif data.endswith(b"0\r\n\r\n"):
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the frontend closed the connection"))


class Order(msgspec.Struct):
    """What a load generator is to do."""

    url: str
    streams: int
    requests: int
    """Of each stream, one after the other."""
    tokens: int
    seed: int


class Load(msgspec.Struct):
    """What it saw."""

    seconds: float
    events: int
    """With text."""
    writes: int
    ttft: list[float]


def ask(host: str, number: int, tokens: int) -> bytes:
    prompt = [32 + (number * 7919 + i * i * (number % 89 + 1)) % 90 for i in range(PROMPT)]
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


async def generate(order: Order) -> Load:
    address = urlsplit(order.url)
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(order.streams):
        _, stream = await loop.create_connection(Stream, address.hostname, address.port)
        streams.append(stream)

    async def run(index: int, stream: Stream) -> list[float]:
        # Spread over a token's time, as users are.
        await asyncio.sleep(0.02 * index / order.streams)
        first = order.seed + index * order.requests
        asks = [ask(address.netloc, first + number, order.tokens) for number in range(order.requests)]
        return [await stream.ask(request) for request in asks]

    begun = time.perf_counter()
    ttft = await asyncio.gather(*(run(index, stream) for index, stream in enumerate(streams)))
    seconds = time.perf_counter() - begun
    answers = order.streams * order.requests
    # Each answer ends with a chunk that says why and with [DONE]; neither has text.
    events = sum(stream.events for stream in streams) - 2 * answers
    return Load(seconds, events, sum(stream.writes for stream in streams), [t for ts in ttft for t in ts])


def load(order: Order) -> Load:
    """In a process of its own."""
    command = [sys.executable, __file__, "--generate", msgspec.json.encode(order).decode()]
    return msgspec.json.decode(subprocess.check_output(command), type=Load)


# The graph


def cpu(pids: Iterable[int]) -> float:
    """Seconds that all threads of these processes have run."""
    total = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0])
    return total / 1e9


class Graph:
    """Brought up with its own state; taken down at the end."""

    def __init__(self, state: Path, config: dict[str, object], replicas: int) -> None:
        file = state / "front-bench.yaml"
        frontend: dict[str, object] = {"port": 0}
        if replicas > 1:
            frontend["replicas"] = replicas
        file.write_text(GRAPH.format(config=json.dumps(config), frontend=json.dumps(frontend)))
        self._state = state
        self._env = {**os.environ, "PDD_STATE_DIR": str(state)}
        self._cli("up", str(file), "-d", "--wait")
        self._rows: list[dict[str, Any]] = json.loads(self._cli("ps", NAME, "--format", "json"))
        self.url = str(next(row["endpoint"] for row in self._rows if row["role"] == "frontend"))

    def _cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pdd_runtime.cli", *arguments]
        return subprocess.run(command, env=self._env, check=True, stdout=subprocess.PIPE, text=True).stdout

    def down(self) -> None:
        self._cli("down", NAME)

    @property
    def frontends(self) -> list[int]:
        return [row["pid"] for row in self._rows if row["role"] == "frontend"]

    @property
    def workers(self) -> list[int]:
        return [row["pid"] for row in self._rows if row["role"] != "frontend"]

    async def direct(self, number: int) -> float:
        """Seconds to the first token by a call to the worker, without a frontend."""
        launcher = json.loads((self._state / NAME / "launcher.json").read_text())
        greeting = Greeting(graph=NAME, secret=launcher["secret"], cluster="dc", name="bench")
        endpoint = next(row["endpoint"] for row in self._rows if row["role"] != "frontend")
        connection = await connect(endpoint, greeting)
        begun = time.perf_counter()
        async with connection.stream("engine.decode", decode(number, 2), DecodeEvent, timeout=30) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
        took = time.perf_counter() - begun
        await connection.close()
        return took


def decode(number: int, tokens: int) -> DecodeRequest:
    prompt = tuple(32 + (number * 104729 + i * i * (number % 83 + 1)) % 90 for i in range(PROMPT))
    return DecodeRequest(
        id=f"bench-{number}", tokens=prompt, prompt_tokens=PROMPT, max_tokens=tokens, sampling=Sampling(temperature=0)
    )


# The engine alone


async def alone(config: dict[str, object], streams: int, tokens: int) -> float:
    """CPU seconds per token of the scripted engine by itself, in this process."""
    engine = ScriptedEngine(
        ScriptedEngine.Config.model_validate(config), ModelSpec(source="toy", dtype="float32", mode="fast")
    )
    await engine.start(StoreHost())

    async def run(number: int) -> None:
        await asyncio.sleep(0.02 * number / streams)
        async for _ in engine.decode(decode(number, tokens)):
            pass

    begun = cpu([os.getpid()])
    await asyncio.gather(*(run(number) for number in range(streams)))
    used = cpu([os.getpid()]) - begun
    await engine.close()
    return used / (streams * tokens)


# The bare forwarder


class Sink(asyncio.Protocol):
    """Reads and forgets."""


class Forwarder(asyncio.Protocol):
    """Writes what comes in turn to each of its outputs."""

    def __init__(self, outputs: list[asyncio.WriteTransport]) -> None:
        self._outputs, self._at = outputs, 0

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), MESSAGE):
            self._outputs[self._at].write(data[start : start + MESSAGE])
            self._at = (self._at + 1) % len(self._outputs)


async def forward(source: int, sink: int, streams: int) -> None:
    """In a process of its own, until its source closes."""
    loop = asyncio.get_running_loop()
    outputs = []
    for _ in range(streams):
        transport, _ = await loop.create_connection(Sink, "127.0.0.1", sink)
        outputs.append(transport)
    await loop.create_connection(lambda: Forwarder(outputs), "127.0.0.1", source)
    await asyncio.Event().wait()


async def bare(streams: int, messages: int, pause: float) -> float:
    """CPU seconds per message of a bare forwarder: `messages` for each stream, one for all every `pause` seconds."""
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[asyncio.WriteTransport] = loop.create_future()

    class Source(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            begun.set_result(transport)

    source, sink = await loop.create_server(Source, "127.0.0.1", 0), await loop.create_server(Sink, "127.0.0.1", 0)
    ports = [server.sockets[0].getsockname()[1] for server in (source, sink)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--forward", f"{ports[0]},{ports[1]},{streams}"
    )
    try:
        out = await begun
        before, start = cpu([process.pid]), loop.time()
        for step in range(messages):
            out.write(bytes(MESSAGE) * streams)
            await asyncio.sleep(max(0.0, start + (step + 1) * pause - loop.time()))
        await asyncio.sleep(0.1)
        return (cpu([process.pid]) - before) / (messages * streams)
    finally:
        process.kill()
        await process.wait()
        source.close()
        sink.close()


# The measurement


@dataclass
class Level:
    """At so many streams; each list has a value for every repeat."""

    streams: int
    frontend_us: list[float] = field(default_factory=list)
    worker_us: list[float] = field(default_factory=list)
    engine_us: list[float] = field(default_factory=list)
    bare_us: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_chunk: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        row = {name: statistics.median(value) for name, value in asdict(self).items() if name != "streams"}
        row["plane_us"] = max(0.0, row["worker_us"] - row["engine_us"])
        row["together_us"] = row["frontend_us"] + row["plane_us"]
        return row


def measure(graph: Graph, level: Level, config: dict[str, Any], tokens: int, seed: int) -> None:
    requests = max(1, 4 // level.streams)
    front, work = cpu(graph.frontends), cpu(graph.workers)
    seen = load(Order(graph.url, level.streams, requests, tokens, seed))
    made = level.streams * requests * tokens
    level.frontend_us.append((cpu(graph.frontends) - front) / made * 1e6)
    level.worker_us.append((cpu(graph.workers) - work) / made * 1e6)
    level.engine_us.append(uvloop.run(alone(config, level.streams, tokens)) * 1e6)
    level.bare_us.append(asyncio.run(bare(level.streams, tokens // 2, config["token_time"])) * 1e6)
    level.tokens_per_s.append(made / seen.seconds)
    level.tokens_per_chunk.append(made / max(1, seen.events))
    level.ttft_ms.append(statistics.median(seen.ttft) * 1e3)


def first_tokens(graph: Graph, count: int) -> tuple[list[float], list[float]]:
    """(ms through the frontend, ms by a direct call), in turn, on an idle graph."""
    through, direct = [], []

    async def run() -> None:
        address = urlsplit(graph.url)
        _, stream = await asyncio.get_running_loop().create_connection(Stream, address.hostname, address.port)
        for number in range(count):
            through.append(await stream.ask(ask(address.netloc, 900_000 + number, 2)) * 1e3)
            direct.append(await graph.direct(900_000 + number) * 1e3)

    asyncio.run(run())
    return through, direct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,256", help="how many at once, one measurement each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--token-time", type=float, default=0.02, help="seconds between two tokens of a stream")
    parser.add_argument("--replicas", type=int, default=1, help="frontend processes")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    parser.add_argument("--forward", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.forward:
        uvloop.run(forward(*(int(part) for part in args.forward.split(","))))
        return
    if args.generate:
        seen = asyncio.run(generate(msgspec.json.decode(args.generate, type=Order)))
        sys.stdout.buffer.write(msgspec.json.encode(seen))
        return
    levels = [Level(int(streams)) for streams in args.streams.split(",")]
    most = max(level.streams for level in levels)
    config: dict[str, Any] = {"token_time": args.token_time, "batch_limit": most, "capacity_blocks": 64 * most}
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as scratch:
        graph = Graph(Path(scratch), config, args.replicas)
        try:
            load(Order(graph.url, 4, 1, 20, 0))
            through, direct = first_tokens(graph, 20 * args.repeats)
            before = cpu(graph.frontends)
            time.sleep(IDLE)
            idle = (cpu(graph.frontends) - before) / IDLE * 1e3
            for repeat in range(args.repeats):
                for level in levels:
                    measure(graph, level, config, args.tokens, 1000 + 10_000 * repeat)
                    print(f"{repeat}: {level.streams} streams, {level.frontend_us[-1]:.0f} us", file=sys.stderr)
        finally:
            graph.down()
    report(levels, through, direct, idle, args.format)


def report(levels: list[Level], through: list[float], direct: list[float], idle: float, form: str) -> None:
    added = statistics.median(through) - statistics.median(direct)
    rows = {level.streams: level.medians() for level in levels}
    if form == "json":
        ttft = {"through_ms": statistics.median(through), "direct_ms": statistics.median(direct), "added_ms": added}
        targets = {"together_us": CPU_TARGET, "added_ttft_ms": TTFT_TARGET}
        print(json.dumps({"streams": rows, "first_token": ttft, "idle_ms_per_s": idle, "targets": targets}, indent=2))
        return
    columns: dict[str, Callable[[dict[str, float]], str]] = {
        "frontend": lambda row: f"{row['frontend_us']:.0f}",
        "plane": lambda row: f"{row['plane_us']:.0f}",
        "together": lambda row: f"{row['together_us']:.0f}",
        "(bare)": lambda row: f"{row['bare_us']:.0f}",
        "(engine)": lambda row: f"{row['engine_us']:.0f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
        "tokens/chunk": lambda row: f"{row['tokens_per_chunk']:.2f}",
        "TTFT ms": lambda row: f"{row['ttft_ms']:.1f}",
    }
    print("CPU in us per streamed token. frontend: HTTP, driver and the plane's client side; plane: its serving side")
    print("(bare): a process that only forwards such messages; (engine): the scripted engine by itself")
    print(f"{'streams':>8}" + "".join(f"{name:>14}" for name in columns))
    for streams, row in rows.items():
        print(f"{streams:>8}" + "".join(f"{show(row):>14}" for show in columns.values()))
    print(f"to reach: together {CPU_TARGET:.0f} or less")
    print(
        f"an idle frontend takes {idle:.1f} ms of CPU a second (signs of life, readiness): part of what few streams pay"
    )
    print(
        f"first token at one stream: {statistics.median(through):.2f} ms through the frontend, "
        f"{statistics.median(direct):.2f} ms by a direct call: {added:.2f} ms added (to reach: {TTFT_TARGET:.0f} or "
        "less)"
    )


if __name__ == "__main__":
    main()
