"""What a pool may set for SGLang."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from pdd_runtime.graph.units import Duration
from pdd_runtime.plugins.exposure import InClear
from pdd_runtime.server.config import ServerConfig, check_second_socket
from pdd_runtime.server.flags import flag_of

OURS = {
    "--model-path": "set spec.model.source",
    "--model": "set spec.model.source",
    "--dtype": "set spec.model.dtype",
    "--port": "set port",
    "--tp-size": "set tp",
    "--tensor-parallel-size": "set tp",
    "--context-length": "set context_length",
    "--max-running-requests": "set batch_limit",
    "--max-total-tokens": "set engine_kv_memory",
    "--chunked-prefill-size": "set token_budget",
    "--attention-backend": "set attention",
    "--device": "set device",
    "--kv-cache-dtype": "KV is shared in the model's own dtype",
    "--disable-radix-cache": "KV is shared through the radix cache",
    "--radix-cache-backend": "KV is shared through the radix cache that SGLang has by default",
    "--disaggregation-mode": "with data_plane pdd each server answers ordinary requests; with another one the pool's "
    "role says it",
}
"""Flags that `args` may never have, and what to do instead, or why."""
SHARED = {
    "--page-size": "with pages of one token a prompt's KV is shared to its last token",
    "--enable-hierarchical-cache": "SGLang has no linker beside HiCache",
    "--pp-size": "the linker does not have pipeline parallelism",
    "--pipeline-parallel-size": "the linker does not have pipeline parallelism",
    "--speculative-algorithm": "the linker does not have speculative decoding",
    "--enable-dp-attention": "the linker does not have data-parallel attention",
}
"""Those that it may not have with `data_plane: pdd`."""
NATIVE = {
    "--page-size": "set block_size",
    "--host": "set transfer_host",
    "--disaggregation-transfer-backend": "set data_plane",
    "--disaggregation-bootstrap-port": "set bootstrap_port",
    "--disaggregation-decode-allocation-policy": "the first token is made before any reader is there",
    "--optimistic-prefill-attempts": "the first token is made before any reader is there",
    "--enable-pd-role-switch": "the pool's role does not change",
    "--kv-events-config": "the worker reads the events",
    "--dp-size": "one cache is one worker's: set replicas",
    "--data-parallel-size": "one cache is one worker's: set replicas",
    "--enable-dp-attention": "one cache is one worker's: set replicas",
    "--enable-unified-cache-external-linker": "the linker goes with data_plane pdd",
    "--speculative-algorithm": "tokens of a draft were not tried with it",
}
"""Those that it may not have with another one."""
ITS_ENV = {
    "SGLANG_HOST_IP": "set transfer_host",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "set transfer_timeout",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "set transfer_timeout",
    "SGLANG_RUST_SERVER": "a bootstrap server that is its API was not tried with it",
}
"""Variables that `env` may not have with another one."""
NOBODY = "2.2.2.2"
"""The host of requests that have no other side (SGLang's `FAKE_BOOTSTRAP_HOST`): a prefill server answers them with a
token, and keeps none of their KV; a decode server answers out of KV that nobody has written."""
REPLAY = ".replay"
"""Behind the path where events are heard: where those that were missed are asked for."""


class SglangConfig(ServerConfig, frozen=True, extra="forbid"):
    device: Literal["cuda", "cpu"] = "cuda"
    """What it computes on. `cpu` is for tests: small models on PyTorch alone, with the package `pdd-sglang-cpu` where
    the server runs."""
    token_budget: int | None = Field(None, ge=1)
    """Tokens of a prompt in one pass; longer prompts are computed in parts, and each part is published as it is done.
    By default what SGLang takes for the accelerator."""
    attention: str | None = None
    """SGLang's attention backend: over `data_plane: pdd` one that can have pages of one token. By default what SGLang
    takes."""
    data_plane: Literal["pdd", "mooncake", "mooncake_tcp", "nixl"] = "pdd"
    """What moves KV: `pdd` our agents, over the transports of the graph's edges; any other SGLang's own
    disaggregation with that transfer backend, between pools that all have it (`mooncake_tcp`: without RDMA)."""
    transfer_host: Annotated[str, InClear("its KV and its API")] = "127.0.0.1"
    """SGLang's own transfer: the IP address of this host at which the servers that it exchanges KV with reach it.
    Neither that transfer nor the API of a prefill server, which then listens there too, knows whom it speaks with:
    beyond the host its cluster must be `insecure`."""
    bootstrap_port: int = Field(0, ge=0, le=65535)
    """SGLang's own transfer: where a prefill server is asked for its KV; 0: a free one."""
    transfer_timeout: Duration = Field(300.0, ge=1)
    """SGLang's own transfer: after so long without a reader, or without its end, a server gives a transfer up by
    itself: more than the KV of the longest prompt takes over the slowest link."""

    @property
    def native(self) -> bool:
        """Whether SGLang moves its KV itself."""
        return self.data_plane != "pdd"

    @field_validator("args")
    @classmethod
    def _not_ours(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        _refuse(args, OURS)
        return args

    @field_validator("transfer_host")
    @classmethod
    def _an_address(cls, host: str) -> str:
        try:
            nowhere = ip_address(host).is_unspecified
        except ValueError:
            nowhere = True  # SGLang listens at what it is given, and no name is an address to listen at
        if nowhere or host == NOBODY:
            raise ValueError(f"{host!r} is no IP address that others could reach this host at")
        return host

    @model_validator(mode="after")
    def _plane(self) -> Self:
        _refuse(self.args, NATIVE if self.native else SHARED)
        given = self.model_fields_set
        if not self.native:
            unused = [name for name in ("transfer_host", "bootstrap_port", "transfer_timeout") if name in given]
            if unused:
                raise ValueError(f"{unused[0]} is of SGLang's own transfer: set data_plane as well")
            return self
        for name in self.env:
            if name in ITS_ENV:
                raise ValueError(f"{name} is not for env: {ITS_ENV[name]}")
        if "kv_memory" in given:
            raise ValueError(f"kv_memory: with data_plane {self.data_plane} no memory is shared; set engine_kv_memory")
        if self.url is not None and {"bootstrap_port", "transfer_timeout"} & given:
            raise ValueError("url: the running server has a bootstrap_port and a transfer_timeout of its own")
        if self.device == "cpu" and self.data_plane != "mooncake_tcp":
            raise ValueError(
                f"data_plane {self.data_plane} moves an accelerator's memory: with device cpu set mooncake_tcp"
            )
        check_second_socket(self.socket, REPLAY)
        return self


def _refuse(args: tuple[str, ...], why: dict[str, str]) -> None:
    for arg in args:
        if (flag := flag_of(arg, why)) is not None:
            raise ValueError(f"{flag} is not for args: {why[flag]}")
