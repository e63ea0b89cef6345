"""The message plane: msgpack frames over TCP, unary calls and server-streams with deadlines and cancellation."""

from pdd_runtime.rpc.channel import Heartbeat
from pdd_runtime.rpc.connection import RpcConnection, connect
from pdd_runtime.rpc.context import RpcContext
from pdd_runtime.rpc.greeting import PROTOCOL, Greeting
from pdd_runtime.rpc.line import Line
from pdd_runtime.rpc.sealing import RECORD_BYTES, Sealing
from pdd_runtime.rpc.server import LineTo, RpcServer, no_line
from pdd_runtime.rpc.sparse import SparseLog
from pdd_runtime.rpc.strangers import Strangers, within_files
from pdd_runtime.rpc.stream import RpcStream
from pdd_runtime.rpc.tls import Tls, identity, said

__all__ = [
    "PROTOCOL",
    "RECORD_BYTES",
    "Greeting",
    "Heartbeat",
    "Line",
    "LineTo",
    "RpcConnection",
    "RpcContext",
    "RpcServer",
    "RpcStream",
    "Sealing",
    "SparseLog",
    "Strangers",
    "Tls",
    "connect",
    "identity",
    "no_line",
    "said",
    "within_files",
]
