"""One end of a transfer as a process of its own.

`serve TLS BLOCKS [MIB]`: prints the endpoint; blocks of so many MiB are there, and are fed until standard input ends.
`fetch TLS BLOCKS ENDPOINT`: fetches them; prints `first` when one has come, and `ok` when all have.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys

import msgspec
from pdd_rdma.config import RdmaConfig
from pdd_rdma.transport import RdmaTransport

from pdd_runtime.kv import KvLayout
from pdd_runtime.testing.kv_parties import LAYOUT, Context, StoreSink, StoreSource, sequence, subscription


def of(mebibytes: int) -> KvLayout:
    """The layout of blocks of that size."""
    return msgspec.structs.replace(LAYOUT, layers=128 * mebibytes)


LARGE = of(1)


async def serve(config: RdmaConfig, blocks: int, mebibytes: str = "1") -> None:
    layout = of(int(mebibytes))
    source = StoreSource(layout, blocks)
    source.make(sequence(blocks, layout))
    transport = RdmaTransport(config, Context("dc-a", memory=source.store.buffer()))
    print(await transport.serve(source, "127.0.0.1"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def fetch(config: RdmaConfig, blocks: int, endpoint: str) -> None:
    wanted = sequence(blocks, LARGE)
    sink = StoreSink(wanted, LARGE, on_done=lambda index: print("first", flush=True) if index == 0 else None)
    transport = RdmaTransport(config, Context("dc-b", memory=sink.store.buffer()))
    await transport.fetch(endpoint, subscription(wanted, layout=LARGE), sink)
    await transport.close()
    print("ok" if sink.whole else "not whole", flush=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(90, exit=True)  # One that hangs is to say where.
    what, tls, count, *rest = sys.argv[1:]
    asyncio.run((serve if what == "serve" else fetch)(RdmaConfig(tls=tls), int(count), *rest))
