"""Certificates of a test's own, made where they are needed."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

from pdd_runtime.cli.certificates import Authority
from pdd_runtime.rpc import Tls


class Issuer:
    """A CA, and the certificates of a graph's clusters by it."""

    def __init__(self, graph: str, directory: Path | None = None) -> None:
        self.graph, self.directory = graph, directory or Path(mkdtemp(prefix="pdd-certs-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(graph, 1)
        self.authority.save(self.directory)

    def thief(self, cluster: str, victim: Issuer) -> Tls:
        """One with a certificate by this CA that does not mind the victim's."""
        self.tls(cluster)
        both = self.directory / "both.pem"
        both.write_text("".join((each.directory / "ca.pem").read_text() for each in (victim, self)))
        cert, key = (self.directory / self.graph / f"{cluster}.{end}" for end in ("pem", "key"))
        return Tls(ca=both, cert=cert, key=key, graph=self.graph, cluster=cluster)

    def tls(self, cluster: str, graph: str = "") -> Tls:
        """What a process of `cluster` shows; of another graph, where one is named."""
        place = self.directory / (graph or self.graph)
        place.mkdir(exist_ok=True)
        self.authority.issue(place, cluster, graph=graph)
        ca, cert, key = self.directory / "ca.pem", place / f"{cluster}.pem", place / f"{cluster}.key"
        return Tls(ca=ca, cert=cert, key=key, graph=graph or self.graph, cluster=cluster)
