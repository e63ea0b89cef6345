"""One end of a transfer as a process of its own.

`serve N`: prints the endpoint, makes a block for each line on stdin, ends the request at end of input.
`fetch ENDPOINT N`: fetches the sequence and prints `ok` when it is whole.
"""

from __future__ import annotations

import asyncio
import sys

from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport

from pdd_runtime.testing.kv_parties import Context, StoreSink, StoreSource, sequence, subscription


async def serve(blocks: int) -> None:
    transport, source = TcpTransport(TcpConfig(), Context("dc-a")), StoreSource()
    print(await transport.serve(source, "127.0.0.1"), flush=True)
    wanted = sequence(blocks)
    while await asyncio.to_thread(sys.stdin.readline):
        source.make([wanted.pop(0)])
    source.end()
    await transport.close()


async def fetch(endpoint: str, blocks: int) -> None:
    transport, wanted = TcpTransport(TcpConfig(), Context("dc-b")), sequence(blocks)
    sink = StoreSink(wanted)
    report = await transport.fetch(endpoint, subscription(wanted), sink)
    await transport.close()
    print("ok" if sink.whole and report.blocks == blocks else f"not whole: {report}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2])))
    else:
        asyncio.run(fetch(sys.argv[2], int(sys.argv[3])))
