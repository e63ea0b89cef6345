"""Where a worker can be fetched from, over which transports."""

from __future__ import annotations

from collections.abc import Mapping

from pdd_runtime.errors import TransferError

RDMA = "rdma"


def written(endpoints: Mapping[str, str]) -> str:
    """`rdma=host:port,tcp=host:port`, or the address alone where there is only our own."""
    if [*endpoints] == [RDMA]:
        return endpoints[RDMA]
    return ",".join(f"{name}={address}" for name, address in endpoints.items())


def read(endpoint: str) -> dict[str, str]:
    """Transport to address. Raises `TransferError`."""
    pairs = [part.partition("=") for part in endpoint.split(",")] if "=" in endpoint else [(RDMA, "=", endpoint)]
    for _, _, address in pairs:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise TransferError(f"{endpoint!r} is no endpoint", fix="give it as host:port")
    return {name: address for name, _, address in pairs}
