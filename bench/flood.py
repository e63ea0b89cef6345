"""What ten times too much does to a graph: goodput, fairness and refusals.

    python bench/flood.py [--seconds 60] [--times 10] [--slo 4] [--aggregated] [--format text|json]

`pdd-runtime up` starts a frontend with two API keys, and prefill, relay and main with the scripted engine, main behind
an emulated link. An answer is *good* when it is whole, and no wait for its first token, or between two, was longer than
`--slo` seconds. A load generator in a process of its own, which waits for nobody, asks:

1. *peak*: as much as more streams at once bring more good answers for: the best of some numbers of streams.
2. *flood*: `--times` the peak, in equal parts by two keys, for `--seconds`.
3. *one floods*: the same, but the second key asks for a third of the peak only.

The peak is measured again after each flood. Printed are good answers a second as a share of it, what each key got of
what it asked for, how many were refused, and how long those waited who were let in. All are ratios of one run, on one
machine, which the load generator shares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

GOAL = 0.9
"""Good answers under the flood, of those at the peak."""
NAME = "flood-bench"
SHORTEST, LONGEST, TOKEN_TIME, PROMPT = 15, 35, 0.08, 128
"""Tokens of answers, of which no two are the same length lest they end in step; seconds for each; tokens of prompts."""
STREAMS = (8, 12, 16, 20)
"""At once, when the peak is looked for."""
BATCH = 8
BEGINS = 2.0
"""Seconds of each load before what ends is counted: those at the end are left out as well."""
PAUSE = 0.2
"""Seconds that a stream waits when it was refused."""
LAST = 2000
"""Bytes in which an answer says why it ends."""
MODEST = 1 / 3
"""What the second key asks for, of the peak, where one floods."""
ENGINE = f"{{plugin: scripted, config: {{batch_limit: {BATCH}, token_time: {TOKEN_TIME}}}}}"
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {{name: flood-bench}}
spec:
  model: {{source: toy}}
  clusters: {{dc-a: {{}}, dc-b: {{}}}}
  links:
    wan: {{between: [dc-a, dc-b], bandwidth: 20Mbit/s, rtt: 20ms, emulate: true}}
  pools:
    prefill: {{role: prefill, cluster: dc-a, engine: {engine}}}
    relay: {{role: relay, cluster: dc-a, engine: {engine}}}
    main: {{role: main, cluster: dc-b, engine: {engine}}}
  edges:
    - {{from: prefill, to: relay, carries: kv, transport: {{plugin: tcp}}}}
    - {{from: prefill, to: main, carries: kv, transport: {{plugin: tcp}}, link: wan}}
    - {{from: relay, to: main, carries: tokens, link: wan}}
  admission: {{max_wait: {max_wait}s}}
  frontend: {{port: 0, keys: keys.jsonl}}
"""
AGGREGATED = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {{name: flood-bench}}
spec:
  model: {{source: toy}}
  clusters: {{dc: {{}}}}
  pools:
    main: {{role: aggregated, cluster: dc, engine: {engine}}}
  admission: {{max_wait: {max_wait}s}}
  frontend: {{port: 0, keys: keys.jsonl}}
"""


# The load generator


class Seen(msgspec.Struct):
    """One answer, or refusal. Times are seconds from asking."""

    key: str
    status: int
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0
    """The longest between two tokens."""
    whole: bool = False
    retry_after: float = 0.0
    ended: float = 0.0
    """Seconds from the generator's start."""

    def good(self, slo: float) -> bool:
        return self.whole and self.first <= slo and self.gap <= slo


class Order(msgspec.Struct):
    """What a load generator is to do for `seconds`."""

    url: str
    keys: dict[str, str]
    """Secrets, by name."""
    seconds: float
    streams: int = 0
    """Closed loop: so many at once, by the keys in turn."""
    rates: dict[str, float] = {}
    """Open loop: requests a second, by key."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[Seen] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's own class

    async def ask(self, key: str, request: bytes) -> Seen:
        loop = asyncio.get_running_loop()
        self._done, self._seen, self._head, self._tail = loop.create_future(), Seen(key, 0), b"", b""
        self._begun = loop.time()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        seen, at = self._seen, asyncio.get_running_loop().time() - self._begun
        if not seen.status:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            seen.status = int(head[9:12])
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            seen.retry_after = float(fields.get(b"retry-after", 0))
            self._left = int(fields.get(b"content-length", 0))
        if seen.status != 200:
            self._left -= len(data)
            if self._left <= 0:
                self._done.set_result(seen)
            return
        if data:
            seen.gap = max(seen.gap, at - seen.last) if seen.first else 0.0
            seen.first, seen.last = seen.first or at, at
        self._tail = (self._tail + data)[-LAST:]
        if self._tail.endswith(b"0\r\n\r\n"):
            seen.whole = b'"finish_reason":"length"' in self._tail and b"[DONE]" in self._tail
            self._done.set_result(seen)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._seen.status = self._seen.status if self._seen.status not in (0, 200) else 599
            self._done.set_result(self._seen)

    @property
    def open(self) -> bool:
        return not self._transport.is_closing()


class Generator:
    """Asks, and keeps what it saw."""

    def __init__(self, order: Order) -> None:
        self._order, self._address = order, urlsplit(order.url)
        self._idle: list[Connection] = []
        self._random = random.Random()
        self.seen: list[Seen] = []

    async def run(self) -> list[Seen]:
        self._begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            self._until = asyncio.get_running_loop().time() + self._order.seconds
            names = list(self._order.keys)
            for number in range(self._order.streams):
                group.create_task(self._stream(names[number % len(names)]))
            for name, rate in self._order.rates.items():
                group.create_task(self._open_loop(group, name, rate))
        return self.seen

    async def _stream(self, key: str) -> None:
        while asyncio.get_running_loop().time() < self._until:
            if (await self._ask(key)).status == 429:
                await asyncio.sleep(PAUSE)

    async def _open_loop(self, group: asyncio.TaskGroup, key: str, rate: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while (at := at + self._random.expovariate(rate)) < self._until:
            await asyncio.sleep(at - loop.time())
            group.create_task(self._ask(key))

    async def _ask(self, key: str) -> Seen:
        while self._idle and not self._idle[-1].open:
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
        else:
            host, port = str(self._address.hostname), self._address.port or 80
            _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
        seen = await connection.ask(key, self._request(key))
        seen.ended = asyncio.get_running_loop().time() - self._begun
        self.seen.append(seen)
        if connection.open:
            self._idle.append(connection)
        return seen

    def _request(self, key: str) -> bytes:
        prompt = [self._random.randrange(32, 122) for _ in range(PROMPT)]
        tokens = self._random.randint(SHORTEST, LONGEST)
        body = json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._order.keys[key]}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return f"{head}{body}".encode()


def generate(order: Order) -> list[Seen]:
    """In a process of its own."""
    with tempfile.NamedTemporaryFile() as seen:
        subprocess.check_call([sys.executable, __file__, "--generate", msgspec.json.encode(order).decode(), seen.name])
        return msgspec.json.decode(seen.read(), type=list[Seen])


# The graph


class Graph:
    """Brought up with its own state; taken down at the end."""

    def __init__(self, state: Path, text: str, slo: float) -> None:
        self._env = {**os.environ, "PDD_STATE_DIR": str(state)}
        self.keys = {}
        for name in ("one", "two"):
            made = self._cli("keys", "add", name, "--file", str(state / "keys.jsonl"), "--format", "json")
            self.keys[name] = str(json.loads(made)["key"])
        file = state / "flood.yaml"
        # Half of what a user is ready to wait for: the rest is for what comes after the queue.
        file.write_text(text.format(engine=ENGINE, max_wait=slo / 2))
        self._cli("up", str(file), "-d", "--wait")
        rows: list[dict[str, Any]] = json.loads(self._cli("ps", NAME, "--format", "json"))
        self.url = str(next(row["endpoint"] for row in rows if row["role"] == "frontend"))

    def ask(self, seconds: float, **load: Any) -> list[Seen]:
        return generate(Order(url=self.url, keys=self.keys, seconds=seconds, **load))

    def down(self) -> None:
        self._cli("down", NAME)

    def _cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pdd_runtime.cli", *arguments]
        return subprocess.run(command, env=self._env, check=True, stdout=subprocess.PIPE, text=True).stdout


# The measurement


@dataclass
class Phase:
    """What came of one load."""

    goodput: float
    """Good answers a second."""
    asked: dict[str, float] = field(default_factory=dict)
    """A second, by key."""
    good: dict[str, float] = field(default_factory=dict)
    refused: float = 0.0
    """Of all requests."""
    failed: int = 0
    """Neither whole nor refused with 429."""
    late: float = 0.0
    """Of those that were let in: whole, but not good."""
    ttft: tuple[float, float] = (0.0, 0.0)
    """Median and 90th percentile of those that were let in."""
    gap: float = 0.0
    """The same's longest wait between two tokens, 90th percentile."""
    retry_after: float = 0.0
    """The median of what the refused were told."""


def phase(seen: list[Seen], seconds: float, slo: float) -> Phase:
    seen = [each for each in seen if BEGINS <= each.ended <= seconds]
    seconds -= BEGINS
    whole = [each for each in seen if each.whole]
    good = [each for each in whole if each.good(slo)]
    refused = [each for each in seen if each.status == 429]
    keys = sorted({each.key for each in seen})
    first = sorted(each.first for each in whole) or [0.0]
    return Phase(
        goodput=len(good) / seconds,
        asked={key: sum(each.key == key for each in seen) / seconds for key in keys},
        good={key: sum(each.key == key for each in good) / seconds for key in keys},
        refused=len(refused) / max(1, len(seen)),
        failed=len(seen) - len(whole) - len(refused),
        late=1 - len(good) / max(1, len(whole)),
        ttft=(statistics.median(first), first[int(0.9 * (len(first) - 1))]),
        gap=sorted(each.gap for each in whole)[int(0.9 * (len(whole) - 1))] if whole else 0.0,
        retry_after=statistics.median([each.retry_after for each in refused] or [0.0]),
    )


def measure(graph: Graph, seconds: float, times: float, slo: float) -> dict[str, Phase]:
    looked = BEGINS + seconds / 3

    def peak(streams: int) -> Phase:
        return phase(graph.ask(looked, streams=streams), looked, slo)

    graph.ask(2.0, streams=STREAMS[0])
    found = {streams: peak(streams) for streams in STREAMS}
    best = max(found, key=lambda streams: found[streams].goodput)
    rate = found[best].goodput
    phases = {"peak before": found[best]}
    for name, second in {"flood": times / 2, "one floods": MODEST}.items():
        rates = {"one": (times - second) * rate, "two": second * rate}
        phases[name] = phase(graph.ask(seconds, rates=rates), seconds, slo)
        phases[f"peak after {name}"] = peak(best)
    return phases


def shares(phases: dict[str, Phase]) -> dict[str, float]:
    """Of each flood's goodput in the mean of the peaks before and after it: the machine has other work as well."""
    names = list(phases)
    return {
        names[at]: 2 * phases[names[at]].goodput / (phases[names[at - 1]].goodput + phases[names[at + 1]].goodput)
        for at in (1, 3)
    }


def show(phases: dict[str, Phase]) -> None:
    of_peak = shares(phases)
    print(
        f"{'':22}{'good/s':>8}{'of peak':>9}{'refused':>9}{'failed':>8}{'late':>7}{'TTFT p50, p90':>18}"
        f"{'gap p90':>9}{'retry':>7}"
    )
    for name, found in phases.items():
        p50, p90 = found.ttft
        share = f"{of_peak[name]:.2f}" if name in of_peak else ""
        print(
            f"{name:22}{found.goodput:8.2f}{share:>9}{found.refused:9.1%}{found.failed:8d}"
            f"{found.late:7.1%}{p50:10.2f},{p90:5.2f} s{found.gap:7.2f} s{found.retry_after:6.0f}s"
        )
        for key in found.asked if name in of_peak else ():
            print(f"  key {key}: {found.good[key]:6.2f} good a second of {found.asked[key]:7.2f} asked for")
    one, two = phases["flood"].good.values()
    print(f"fairness between equal keys: {min(one, two) / max(one, two, 1e-9):.2f} (1 is equal)")
    got = phases["one floods"].good["two"] / phases["one floods"].asked["two"]
    print(f"the key that does not flood gets {got:.0%} of what it asks for")
    print(f"goodput under the floods: {min(of_peak.values()):.2f} of the peak or more; the goal is {GOAL}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each flood")
    parser.add_argument("--times", type=float, default=10.0, help="the peak, that the flood asks for")
    parser.add_argument("--slo", type=float, default=4.0, help="seconds to the first token")
    parser.add_argument("--aggregated", action="store_true", help="one worker that does all, instead of three")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--generate", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        order, file = args.generate
        seen = uvloop.run(Generator(msgspec.json.decode(order, type=Order)).run())
        Path(file).write_bytes(msgspec.json.encode(seen))
        return
    with tempfile.TemporaryDirectory(prefix="pdd-flood-") as directory:
        graph = Graph(Path(directory), AGGREGATED if args.aggregated else GRAPH, args.slo)
        try:
            phases = measure(graph, args.seconds, args.times, args.slo)
        finally:
            graph.down()
    if args.format == "json":
        print(msgspec.json.encode(phases).decode())
    else:
        show(phases)


if __name__ == "__main__":
    main()
