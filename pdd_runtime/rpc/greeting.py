"""The greeting: who is calling, and whether the two sides may talk."""

from __future__ import annotations

import hmac

import msgspec

from pdd_runtime.errors import RpcError

PROTOCOL = 1
"""Changes whenever two versions of the message plane would misread each other."""
LONGEST = 256
"""Characters of what a greeting says of its sender: it is logged."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What each side says first. Encoded by field name, so that another protocol's greeting can still be read
    and refused by name."""

    graph: str
    """Name of the graph; empty where it is not known yet (a process that only asks who is there)."""
    secret: str
    cluster: str
    name: str
    """For people: `main/0`, `frontend/0`."""
    epoch: str = ""
    fingerprint: str = ""
    """Of the model; empty while it is not known."""
    protocol: int = PROTOCOL

    def __repr__(self) -> str:
        return f"Greeting({self.name} of {self.graph} in {self.cluster}, epoch {self.epoch})"

    def without_secret(self) -> Greeting:
        """What may be kept and shown of a peer."""
        return msgspec.structs.replace(self, secret="")


def refusal(mine: Greeting, theirs: Greeting, certified: str = "") -> RpcError | None:
    """Why the two may not talk, both values named, or None. Never says what a secret is. `certified`: the cluster of
    their certificate, where they have shown one."""
    longest = max(map(len, (theirs.graph, theirs.cluster, theirs.name, theirs.epoch, theirs.fingerprint)))
    if longest > LONGEST:
        return RpcError(
            f"they greet with a name of {longest} characters; the limit is {LONGEST}",
            where=f"greeting to {mine.name!r}",
        )
    where = f"greeting of {theirs.name!r} to {mine.name!r}"
    if theirs.protocol != mine.protocol:
        return RpcError(
            f"they speak different protocols: {theirs.protocol} != {mine.protocol}",
            where=where,
            fix="run the same version of pdd-runtime on both sides",
        )
    if mine.graph and theirs.graph and theirs.graph != mine.graph:
        return RpcError(
            f"they belong to different graphs: {theirs.graph!r} != {mine.graph!r}",
            where=where,
            fix="check the endpoint; another graph may have taken the port",
        )
    if certified and theirs.cluster and theirs.cluster != certified:
        return RpcError(
            f"they are not who they say they are: in cluster {theirs.cluster!r}, by a certificate of {certified!r}",
            where=where,
            fix="write {cluster} for the cluster's name in spec.security.tls, so that each shows its own",
        )
    if not hmac.compare_digest(theirs.secret.encode(), mine.secret.encode()):
        return RpcError(
            "they do not share a secret",
            where=where,
            why="each `up` makes a new one; a process of an earlier run does not know it",
            fix="stop processes of earlier runs",
        )
    if mine.fingerprint and theirs.fingerprint and theirs.fingerprint != mine.fingerprint:
        return RpcError(
            f"they serve different models: fingerprint {theirs.fingerprint} != {mine.fingerprint}",
            where=where,
            why="KV of one model means nothing to another",
            fix="give both pools the same model",
        )
    return None
