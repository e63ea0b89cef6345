"""What a pool may set for vLLM."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from pdd_runtime.graph.units import Duration
from pdd_runtime.plugins.exposure import InClear
from pdd_runtime.server.config import ServerConfig, check_second_socket
from pdd_runtime.server.flags import flag_of

_SET = {
    "--model": "spec.model.source",
    "--dtype": "spec.model.dtype",
    "--host": "the worker: only it speaks with its server",
    "--port": "port",
    "--block-size": "block_size",
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--max-num-seqs": "batch_limit",
    "--max-model-len": "context_length",
    "--kv-cache-memory-bytes": "engine_kv_memory",
    "--max-logprobs": "max_logprobs",
    "--kv-transfer-config": "data_plane: without it there is no KV to share",
    "--kv-events-config": "the worker, where data_plane: nixl needs it",
    "--no-enable-prefix-caching": "the worker: what is not cached cannot be gone on from",
}
"""Flags of vLLM → where their values come from; a second value would make worker and server disagree."""
_NOT_BY_NIXL = {
    **dict.fromkeys(("--data-parallel-size", "-dp"), "a pool's replicas are its data parallelism"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "vLLM pulls KV from no pipeline of several stages"),
}
"""Flags that go with another data plane → why not with this one."""
_OF_NIXL = ("nixl_host", "nixl_port", "lease")
REPLAY = "-replay"
"""Behind the path where events are heard: where those that were missed are asked for."""
_ITS_ENV = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


class VllmConfig(ServerConfig, frozen=True, extra="forbid"):
    block_size: int = Field(32, ge=1, le=1024)
    """Tokens in a block, and in a page of vLLM. Its CPU attention wants a multiple of 32."""
    threads: int | None = Field(None, ge=1)
    """Cores of one forward pass where vLLM computes on a CPU; by default all that it finds, each bound to one thread.
    Of no use on a GPU."""
    max_logprobs: int = Field(20, ge=0)
    """The most alternatives that a request may ask for with each token."""
    data_plane: Literal["pdd", "nixl"] = "pdd"
    """What KV goes by. `pdd`: our connector and the worker's agent, to engines of any kind. `nixl`: vLLM's own
    NixlConnector, from vLLM to vLLM; its edges have no transport."""
    nixl_host: Annotated[str, InClear("its KV")] = Field("127.0.0.1", min_length=1)
    """With `nixl`: the address of this host by which the readers' servers reach it. What they say there is not
    encrypted, nor is the KV that follows: beyond the host its cluster must be `insecure`."""
    nixl_port: int = Field(0, ge=0, le=65535)
    """With `nixl`: where they ask for what they need to read; 0: a free one."""
    lease: Duration = Field(120.0, ge=12, le=86400)
    """With `nixl`: how long KV is kept for a reader that has not read it. Half of it a reader may take, a wait in its
    queue included: more than the link needs for the longest prompt. An abandoned transfer keeps its KV so long."""

    @field_validator("args")
    @classmethod
    def _not_ours(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        for arg in args:
            if (name := flag_of(arg, _SET)) is not None:
                raise ValueError(f"{name} is set by {_SET[name]}")
        return args

    @model_validator(mode="after")
    def _of_one_plane(self) -> Self:
        native = self.data_plane == "nixl"
        if unused := [name for name in _OF_NIXL if not native and name in self.model_fields_set]:
            raise ValueError(f"{unused[0]} is of no use without data_plane: nixl")
        if not native:
            return self
        if "kv_memory" in self.model_fields_set:
            raise ValueError("kv_memory is of no use with data_plane: nixl: KV is in vLLM alone, see engine_kv_memory")
        for arg in self.args:
            if (name := flag_of(arg, _NOT_BY_NIXL)) is not None:
                raise ValueError(f"{arg} does not go with data_plane: nixl: {_NOT_BY_NIXL[name]}")
        check_second_socket(self.socket, REPLAY)
        if taken := [name for name in _ITS_ENV if name in self.env]:
            raise ValueError(f"{taken[0]} is set by nixl_host and nixl_port")
        return self
