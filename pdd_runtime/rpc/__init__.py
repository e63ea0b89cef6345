"""The message plane: msgpack frames over TCP, unary calls and server-streams with deadlines and cancellation."""

from pdd_runtime.rpc.line import Line

__all__ = ["Line"]
