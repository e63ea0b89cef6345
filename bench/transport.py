"""Bulk KV over TCP: the transport `tcp` beside iperf3 and a plain copy, on loopback and over an emulated WAN.

    python bench/transport.py [loopback|many|goodput|mice|cut ...] [--wan COMMAND] [--repeats 3] [--tls]

`loopback` and `many` need nothing else. The others run in two network namespaces that `COMMAND` makes: `COMMAND up
DELAY_MS JITTER_MS RATE_MBIT LOSS_PCT QUEUE_MS`, `COMMAND a CMD…` and `COMMAND b CMD…` run a command on either side
(addresses 10.77.0.1 and 10.77.0.2, device `wan0`), and `COMMAND down` prints how late the emulator ran at worst as
`maxlate_ms N`. Without `--wan` they are skipped, and so is iperf3 where it is not installed. A run in which the
emulator came later than a fifth of its delay is called inconclusive. With `--tls`, `loopback` has rows with TLS, too.

Sender and receiver are processes of their own; ways take turns, and medians are printed. The plain copy is `sendall`
of the same blocks and `recv_into` the same memory: no names, no checksums, no resume.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport

from pdd_runtime.cli import certificates
from pdd_runtime.clock import now
from pdd_runtime.kv import BlockStore, KvLayout, chain, seed
from pdd_runtime.plugins.transport import Gone, LinkFacts, Ready, Subscription, Wanted
from pdd_runtime.rpc import Tls
from pdd_runtime.testing.kv_parties import Context

BLOCK = 720 << 10
"""Bytes of 16 tokens of a small model in float32."""
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=BLOCK // (2 * 4 * 16), dtype="float32", block_size=16)
DELAY_MS, RATE_MBIT, LOSS_PCT, QUEUE_MS = 25, 200, 0.01, 50
STREAMS = 8
LINK = LinkFacts("wan", RATE_MBIT * 1e6, 2 * DELAY_MS / 1e3, STREAMS)
MOUSE = 1_000_000


# The two sides: processes that talk in lines of JSON.


class Source:
    """Every block is ready, and the memory of a few serves as all."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store

    def open(self, subscription: Subscription) -> Feed:
        return Feed(self.store, len(subscription.blocks))


class Feed:
    def __init__(self, store: BlockStore, blocks: int) -> None:
        self._store, self._left, self._lock = store, iter(range(blocks)), threading.Lock()

    def next(self, timeout: float) -> Ready | Gone | None:
        with self._lock:
            index = next(self._left, None)
        return None if index is None else Ready(index, self._store.memory(index % self._store.blocks))

    def sent(self, index: int) -> None:
        pass

    def close(self) -> None:
        pass


class Sink:
    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def memory(self, index: int) -> memoryview:
        return self._store.memory(index % self._store.blocks)

    def done(self, index: int) -> None:
        pass


def filled(layout: KvLayout, blocks: int) -> BlockStore:
    """A store whose pages are all there: the first touch of memory is no transport's cost."""
    store = BlockStore(layout, blocks)
    for number in range(blocks):
        store.memory(number)[:] = number.to_bytes(4, "little") * (layout.block_bytes // 4)
    return store


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tell(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


async def send(host: str, config: dict[str, Any]) -> None:
    store = filled(LAYOUT, (256 << 20) // BLOCK)
    listener = socket.create_server((host, 0))

    def plain() -> None:
        while True:
            sock, _ = listener.accept()
            with sock:
                blocks = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little")
                for number in range(blocks):
                    sock.sendall(store.memory(number % store.blocks))

    threading.Thread(target=plain, daemon=True).start()
    links = {"there": LINK} if host != "127.0.0.1" else {}
    tls = shown(config.pop("certs", ""), "here")
    transport = TcpTransport(TcpConfig.model_validate(config), Context("here", links=links, tls=tls))
    tell({"tcp": await transport.serve(Source(store), host), "plain": listener.getsockname()})
    while line := await asyncio.to_thread(sys.stdin.readline):
        assert line.strip() == "cpu"
        tell({"cpu": cpu(), "telemetry": [repr(each) for each in transport.telemetry()]})
    await transport.close()


async def receive(config: dict[str, Any]) -> None:
    elephant, mouse = (filled(LAYOUT, size // BLOCK) for size in (256 << 20, 16 << 20))
    links = {"here": LINK} if config.pop("far") else {}
    tls = shown(config.pop("certs", ""), "there")
    transport = TcpTransport(TcpConfig.model_validate(config), Context("there", links=links, tls=tls))

    async def tcp(endpoint: str, name: str, size: int, store: BlockStore) -> float:
        blocks = chain(seed(name, "bench"), range(-(-size // BLOCK) * 16), 16)
        subscription = Subscription(
            request_id=name,
            blocks=tuple(Wanted(block.name, block.tokens) for block in blocks),
            layout=LAYOUT,
            fingerprint="bench",
            epoch="bench",
            cluster="there",
            secret="bench",
            deadline=900,
        )
        begun = now()
        report = await transport.fetch(endpoint, subscription, Sink(store))
        assert report.gone == 0
        return now() - begun

    async def some(endpoint: str, names: Iterator[int], most: dict[str, int]) -> None:
        for name in names:
            await tcp(endpoint, f"many-{name}", 1, mouse)
            if name % 100 == 0:
                most.update({what: max(count, most[what]) for what, count in held().items()})

    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        begun, used = now(), cpu()
        answer: dict[str, Any] = {}
        if "plain" in job:
            await asyncio.to_thread(plain_copy, tuple(job["plain"]), job["bytes"], elephant)
        elif "tcp" in job:
            await tcp(job["tcp"], "one", job["bytes"], elephant)
        elif "many" in job:
            names = iter(range(job["count"]))
            answer = {"sockets": 0, "threads": 0}
            await asyncio.gather(*(some(job["many"], names, answer) for _ in range(100)))
        else:
            big = asyncio.create_task(tcp(job["mice"], "elephant", job["bytes"], elephant)) if job["bytes"] else None
            await asyncio.sleep(1.0)
            times: list[float] = []
            while len(times) < job["count"] and not (big and big.done()):
                times.append(await tcp(job["mice"], f"mouse-{len(times)}", MOUSE, mouse))
                await asyncio.sleep(0.1)
            answer = {"mice": times, "elephant": await big if big else None}
        tell({"seconds": now() - begun, "cpu": cpu() - used} | answer)
    await transport.close()


def shown(certs: str, cluster: str) -> Tls | None:
    if not certs:
        return None
    files = {"ca": f"{certs}/ca.pem", "cert": f"{certs}/{cluster}.pem", "key": f"{certs}/{cluster}.key"}
    return Tls(**files, graph="bench", cluster=cluster)


def held() -> dict[str, int]:
    """Sockets and threads of this process."""
    sockets = sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())
    return {"sockets": sockets, "threads": threading.active_count()}


def plain_copy(address: tuple[str, int], size: int, store: BlockStore) -> None:
    blocks = -(-size // BLOCK)
    with socket.create_connection(address) as sock:
        sock.sendall(blocks.to_bytes(8, "little"))
        for number in range(blocks):
            memory = store.memory(number % store.blocks)
            while memory:
                memory = memory[sock.recv_into(memory) :]


# The one who asks.


class Side:
    """One of the two processes, started by `command`."""

    def __init__(self, command: Sequence[str], role: str, host: str, config: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [*command, sys.executable, __file__, "side", role, host, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, job: Any) -> Any:
        self.post(job)
        return self.read()

    def post(self, job: Any) -> None:
        assert self._process.stdin is not None
        print(job if isinstance(job, str) else json.dumps(job), file=self._process.stdin, flush=True)

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side ended early; its error stands above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Pair(NamedTuple):
    sender: Side
    receiver: Side
    addresses: dict[str, Any]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The receiver's answer, with the CPU-seconds of the sender as `cpu_send`."""
        before = self.sender.ask("cpu")["cpu"]
        answer: dict[str, Any] = self.receiver.ask(job)
        after = self.sender.ask("cpu")
        return answer | {"cpu_send": after["cpu"] - before, "telemetry": after["telemetry"]}


class Places(NamedTuple):
    """Where the two sides run."""

    a: Sequence[str] = ()
    b: Sequence[str] = ()
    host: str = "127.0.0.1"
    certs: str = ""
    """Where certificates are; empty: nothing runs over TLS."""

    @contextmanager
    def pair(self, **config: Any) -> Iterator[Pair]:
        sender = Side(self.a, "send", self.host, config)
        receiver = Side(self.b, "receive", self.host, config | {"far": bool(self.a)})
        try:
            yield Pair(sender, receiver, sender.read())
        finally:
            receiver.close()
            sender.close()

    def iperf(self, size: int, streams: int) -> float | None:
        """Bytes per second received, or None without iperf3. As the transport: the far side asks, this one sends."""
        if shutil.which("iperf3") is None:
            return None
        server = subprocess.Popen(
            [*self.a, "iperf3", "-s", "-1", "-p", "5299"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            congestion = ["-C", "bbr"] if self.a and "bbr" in available() else []
            client = ["iperf3", "-c", self.host, "-p", "5299", "-R", "-n", str(size // streams), "-P", str(streams)]
            for _ in range(50):  # until the server listens
                said = subprocess.run([*self.b, *client, *congestion, "-J"], capture_output=True, text=True).stdout
                received = json.loads(said or "{}").get("end", {}).get("sum_received")
                if received:
                    return float(received["bytes"]) / float(received["seconds"])
                threading.Event().wait(0.05)
            raise SystemExit(f"iperf3 did not run: {said}")
        finally:
            server.terminate()
            server.wait()


def available() -> str:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()


def loopback(places: Places, repeats: int) -> None:
    size = 1 << 30
    rows: dict[str, list[dict[str, Any]]] = {}
    rates = []
    with ExitStack() as stack:
        one, four = (stack.enter_context(places.pair(streams=streams)) for streams in (1, 4))
        ways = [
            ("plain blocking sockets", one, "plain"),
            ("tcp, 1 stream", one, "tcp"),
            ("tcp, 4 streams", four, "tcp"),
        ]
        for streams in (1, 4) if places.certs else ():
            secure = stack.enter_context(places.pair(streams=streams, certs=places.certs))
            ways.append((f"tcp over TLS, {streams} stream{'s' * (streams > 1)}", secure, "tcp"))
        for _ in range(repeats):
            for name, pair, kind in ways:
                rows.setdefault(name, []).append(pair.run({kind: pair.addresses[kind], "bytes": size}))
            rates.append(places.iperf(size, 1))
    best = {name: size / statistics.median(run["seconds"] for run in runs) for name, runs in rows.items()}
    iperf = statistics.median(rate for rate in rates if rate) if rates[0] else None
    print(f"loopback, {size / 1e9:.2f} GB, {repeats} repeats, medians")
    print(f"{'way':24}{'GB/s':>8}{'of plain':>10}{'of iperf3':>11}{'CPU-s/GB both':>15}{'send':>8}{'receive':>9}")
    for name, runs in rows.items():
        sent, received = (statistics.median(run[key] for run in runs) / size * 1e9 for key in ("cpu_send", "cpu"))
        of_iperf = f"{best[name] / iperf:11.2f}" if iperf else f"{'–':>11}"
        print(
            f"{name:24}{best[name] / 1e9:8.2f}{best[name] / best['plain blocking sockets']:10.2f}{of_iperf}"
            f"{sent + received:15.2f}{sent:8.2f}{received:9.2f}"
        )
    print(f"{'iperf3, 1 stream':24}{iperf / 1e9:8.2f}" if iperf else "iperf3 is not installed: no comparison with it")


def many(places: Places, repeats: int) -> None:
    count = 30_000
    with places.pair(streams=STREAMS) as pair:
        run = pair.run({"many": pair.addresses["tcp"], "count": count})
    each = (run["cpu"] + run["cpu_send"]) / count
    rate = count / run["seconds"]
    print(f"{count} transfers of one block, 100 at a time: {rate:.0f} a second, {each * 1e3:.2f} ms CPU each")
    print(f"  the receiver had {run['sockets']} sockets and {run['threads']} threads at most")


def goodput(places: Places, repeats: int) -> None:
    size = 150_000_000
    print(f"goodput, {size / 1e6:.0f} MB over {RATE_MBIT} Mbit/s, {2 * DELAY_MS} ms, {LOSS_PCT} % loss")
    for streams in (1, STREAMS):
        ours, theirs = [], []
        with places.pair(streams=streams) as pair:
            for _ in range(repeats):
                ours.append(size / pair.run({"tcp": pair.addresses["tcp"], "bytes": size})["seconds"] * 8e-6)
                if rate := places.iperf(size, streams):
                    theirs.append(rate * 8e-6)
        mine = statistics.median(ours)
        beside = (
            f"; iperf3 {statistics.median(theirs):.0f}, ratio {mine / statistics.median(theirs):.2f}" if theirs else ""
        )
        print(f"  {streams} streams: tcp {mine:.0f} Mbit/s{beside}")


def mice(places: Places, repeats: int) -> None:
    size, count = 1_000_000_000, 200
    idle, alone = [], 0.0
    print(f"mice of {MOUSE / 1e6:.0f} MB under an elephant of {size / 1e6:.0f} MB, over {RATE_MBIT} Mbit/s")
    with places.pair(streams=STREAMS) as pair:
        idle = pair.run({"mice": pair.addresses["tcp"], "bytes": 0, "count": 60})["mice"]
        alone = pair.run({"tcp": pair.addresses["tcp"], "bytes": size})["seconds"]
    rest, best = np.quantile(idle, (0.5, 0.99))
    print(f"  idle: mice P50 {rest:.3f} s, P99 {best:.3f} s; elephant alone {alone:.1f} s")
    for order in ("shortest", "fifo"):
        with places.pair(streams=STREAMS, order=order) as pair:
            run = pair.run({"mice": pair.addresses["tcp"], "bytes": size, "count": count})
        times = run["mice"]
        theirs = len(times) * MOUSE / (RATE_MBIT * 1e6 / 8)
        p50, p99 = np.quantile(times, (0.5, 0.99))
        print(
            f"  {order:9} {len(times)} mice: P50 {p50:.3f} s, P99 {p99:.3f} s, {p99 / best:.1f}x idle; "
            f"elephant {run['elephant']:.1f} s, {run['elephant'] / (alone + theirs):.2f}x alone and theirs"
        )


def cut(places: Places, repeats: int) -> None:
    size = 100_000_000
    print(f"the link is down for 5 s in a transfer of {size / 1e6:.0f} MB")
    with places.pair(streams=STREAMS) as pair:
        for after in (0.5, 2.0, 3.5):
            before = sent_by(places)
            pair.receiver.post({"tcp": pair.addresses["tcp"], "bytes": size})
            threading.Event().wait(after)
            for state in ("down", "up"):
                subprocess.run([*places.a, "ip", "link", "set", "wan0", state], check=True)
                threading.Event().wait(5.0 if state == "down" else 0)
            answer = pair.receiver.read()
            again = sent_by(places) - before - size
            seconds, more = answer["seconds"], again / 1e6
            print(f"  after {after} s: whole in {seconds:.1f} s; {more:.1f} MB more on the wire than in its blocks")


def sent_by(places: Places) -> int:
    """Bytes that side A has put on the wire."""
    stats = subprocess.run(
        [*places.a, "ip", "-j", "-s", "link", "show", "wan0"], capture_output=True, text=True, check=True
    )
    return int(json.loads(stats.stdout)[0]["stats64"]["tx"]["bytes"])


def on_wan(command: list[str], scenario: Any, repeats: int) -> None:
    up = map(str, (DELAY_MS, 0, RATE_MBIT, LOSS_PCT, QUEUE_MS))
    subprocess.run([*command, "up", *up], check=True)
    try:
        scenario(Places([*command, "a"], [*command, "b"], "10.77.0.1"), repeats)
    finally:
        said = subprocess.run([*command, "down"], capture_output=True, text=True).stdout
        late = max((float(number) for number in re.findall(r"maxlate_ms ([\d.]+)", said)), default=0.0)
        verdict = " INCONCLUSIVE: later than a fifth of its delay" if late > DELAY_MS / 5 else ""
        print(f"  the emulator ran {late:.1f} ms late at worst.{verdict}")


def main() -> None:
    if sys.argv[1:2] == ["side"]:
        role, host, config = sys.argv[2:]
        asyncio.run(send(host, json.loads(config)) if role == "send" else receive(json.loads(config)))
        return
    scenarios = {"loopback": loopback, "many": many, "goodput": goodput, "mice": mice, "cut": cut}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*scenarios, []], default=[], metavar="SCENARIO")
    parser.add_argument("--wan", type=shlex.split, help="the command that makes the emulated WAN")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tls", action="store_true", help="loopback over TLS beside the others")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.tls:
            certificates.make(Path(directory), "bench", ["here", "there"], 1, force=False)
        run(options, scenarios, Places(certs=directory if options.tls else ""))


def run(options: argparse.Namespace, scenarios: dict[str, Any], local: Places) -> None:
    for name in options.scenarios or scenarios:
        if name in ("loopback", "many"):
            scenarios[name](local, options.repeats)
        elif not options.wan:
            print(f"{name}: skipped, for it needs an emulated WAN: --wan COMMAND")
        else:
            on_wan(options.wan, scenarios[name], options.repeats)


if __name__ == "__main__":
    main()
