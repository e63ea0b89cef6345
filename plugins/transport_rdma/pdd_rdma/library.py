"""NIXL, where it is installed: which package, whether a device can be used, and what we call of it."""

from __future__ import annotations

import importlib
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdd_rdma.config import RdmaConfig
from pdd_runtime.errors import PluginError

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""The package `nixl` only chooses between these, by the CUDA version of torch; we ask for them by name."""
DEVICES = Path("/sys/class/infiniband")
Rows = NDArray[np.uint64]
"""Descriptors, one a row: address, bytes and device; or address, bytes, device, stride and count."""


class Handle(Protocol):
    """What NIXL gives for a prepared list or a transfer."""

    def release(self) -> None: ...


class Agent(Protocol):
    """What we call of `nixl_agent`. Every method may raise NIXL's own errors."""

    name: str

    def register_memory(self, reg_list: Rows, mem_type: str) -> Any: ...
    def deregister_memory(self, dereg_list: Any) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> object: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def prep_xfer_dlist(self, agent_name: str, xfer_list: Rows, mem_type: str) -> Handle: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Handle,
        local_indices: NDArray[np.int32],
        remote_xfer_side: Handle,
        remote_indices: NDArray[np.int32],
    ) -> Handle: ...
    def transfer(self, handle: Handle) -> str: ...
    def check_xfer_state(self, handle: Handle) -> str: ...
    def get_new_notifs(self) -> object: ...


MakeAgent = Callable[[str], Agent]


def load(config: RdmaConfig) -> MakeAgent:
    """What makes an agent of that name. Raises `PluginError` where NIXL is not installed, or no device can be used."""
    api = _import()
    _leave_out_efa()
    if not config.tls and "UCX_TLS" not in os.environ:
        _require_device(config)
    options = {"engine_config": f"TLS={config.tls or 'all'}"}
    if config.devices:
        options["ucx_devices"] = ",".join(config.devices)

    def make(name: str) -> Agent:
        agent = api.nixl_agent(name, api.nixl_agent_config(config.progress_thread, backends=[]))
        agent.create_backend("UCX", options)
        return agent  # type: ignore[no-any-return]

    return make


def _import() -> ModuleType:
    troubles = []
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name != package:
                troubles.append(f"{package}: {error}")
        except Exception as error:
            troubles.append(f"{package}: {' '.join(str(error).split())}")
        else:
            _to_our_log()
            return api
    raise PluginError(
        "transport rdma needs NIXL",
        why="; ".join(troubles) or f"neither {' nor '.join(PACKAGES)} is installed",
        fix="pip install --no-deps nixl-cu12==1.5.1 (on CUDA 13: nixl-cu13), or use transport tcp"
        if platform.system() == "Linux"
        else f"NIXL runs on Linux alone, not on {platform.system()}: use transport tcp",
    )


def _to_our_log() -> None:
    """NIXL writes to standard output by itself; our processes have one log."""
    nixl = logging.getLogger("nixl")
    nixl.handlers.clear()
    nixl.propagate = True
    nixl.setLevel(logging.WARNING)


def _leave_out_efa() -> None:
    """UCX's module for AWS's adapters needs the host's libefa, which brings the host's libnl beside the one in NIXL's
    package; at the process's end a destructor of the one walks the other's list, and segfaults (NIXL 1.5.1), in
    whatever order agents and memory were given back. Where there is no such adapter, the module is of no use."""
    drivers = {driver.resolve().name for driver in DEVICES.glob("*/device/driver")}
    if "efa" not in drivers:
        os.environ.setdefault("UCX_MODULES", "^efa")


def _require_device(config: RdmaConfig) -> None:
    there = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    lacking = [device for device in config.devices if device not in there]
    if there and not lacking:
        return
    raise PluginError(
        f"there is no RDMA device {', '.join(lacking)}" if lacking else "there is no RDMA device",
        why=f"{DEVICES} has {', '.join(there) or 'none'}",
        fix="use transport tcp, or set fallback: tcp; inside one host, tls: all goes over shared memory",
    )
