"""Rooms: what SGLang calls one transfer, from one prefill server to one decode server."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Offer
from pdd_sglang.config import NOBODY

ROOMS = 2**62

Host = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-fA-F.:]+\Z", max_length=45)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=ROOMS)]


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the requests of both sides name."""

    host: Host
    """Where the prefill server is asked for its KV."""
    port: Port
    room: Number
    digest: str
    """Of what the KV is of. SGLang compares no tokens: a reader with others would answer, and be wrong."""

    @property
    def body(self) -> dict[str, Any]:
        """Its part of a request."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}

    def offer(self) -> Offer:
        return Offer(msgspec.to_builtins(self))


def new_room(host: str, port: int, digest: str) -> Room:
    """One that nobody has: its number is random."""
    return Room(host, port, secrets.randbelow(ROOMS), digest)


def entered(offer: Offer, wanted: str, request: str) -> Room:
    """The room that `offer` is of, for KV of what has the digest `wanted`. Raises `EngineError` where it is none, or
    that of another: a decode server would end by it, or answer out of other KV."""
    try:
        room = msgspec.convert(offer.params, Room)
    except msgspec.ValidationError as error:
        raise EngineError(
            "this is no offer of an SGLang prefill server",
            where=f"request {request}",
            why=str(error),
            fix="give both pools the engine sglang, with one data_plane",
        ) from error
    if room.host == NOBODY:
        raise EngineError("an offer without a prefill server behind it", where=f"request {request}")
    if room.digest != wanted:
        raise EngineError(
            "the offer is of other KV than what is to be read",
            where=f"request {request}",
            why="model, tenant, tokens or block_size differ between the two sides",
            fix="give both pools one model and one block_size",
        )
    return room
