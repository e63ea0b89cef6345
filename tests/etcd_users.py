"""Users of an etcd, and what they may."""

from __future__ import annotations

from typing import Literal

from pdd_runtime.testing.etcd_server import EtcdServer

_ROOT = ("--user", "root:rooted")


def guard(etcd: EtcdServer) -> None:
    """Give it users: `root`, `pdd` (let-me-in) who may use /pdd/, and `guest` (welcome) who may do nothing."""
    for line in (
        *("user add root:rooted", "user grant-role root root", "role add pdd"),
        "role grant-permission pdd readwrite --prefix=true /pdd/",
        *("user add pdd:let-me-in", "user grant-role pdd pdd", "user add guest:welcome", "auth enable"),
    ):
        etcd.ctl(*line.split())


def allow(etcd: EtcdServer, rights: Literal["readwrite", "read", "nothing"]) -> None:
    """What `pdd` may do from now on with what is below /pdd/."""
    change = "revoke-permission pdd" if rights == "nothing" else f"grant-permission pdd {rights}"
    root(etcd, *f"role {change} --prefix=true /pdd/".split())


def root(etcd: EtcdServer, *arguments: str) -> str:
    """What etcdctl prints, as root."""
    return etcd.ctl(*_ROOT, *arguments)
