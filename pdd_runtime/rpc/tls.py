"""Who a process is by its certificate, and whom it talks to: mutual TLS 1.3 inside one graph."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdd_runtime.errors import RpcError

log = logging.getLogger(__name__)

SCHEME = "pdd"
"""Of the certificate's URI, `pdd://GRAPH/CLUSTER`. It says who a process is, wherever it runs: host names do not."""
_FIX = "make certificates with `pdd-runtime certs init`, one CA for all clusters"
_NOT_OURS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "NO_SHARED_CIPHER": "it has no cipher in common with this side",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "NO_PROTOCOLS_AVAILABLE": "it does not speak TLS 1.3",
}
_PLAIN = ("HTTP_REQUEST", "WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "BAD_RECORD_TYPE")


def identity(graph: str, cluster: str) -> str:
    """What a certificate of one cluster's processes says."""
    return f"{SCHEME}://{graph}/{cluster}"


@dataclass(frozen=True)
class _Loaded:
    """The files as they were at some moment."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    expires: float
    """Seconds since 1970, of the first of them that does."""

    def session(self, *, server: bool, bios: tuple[ssl.MemoryBIO, ssl.MemoryBIO]) -> ssl.SSLObject:
        return (self.server if server else self.client).wrap_bio(*bios, server_side=server)


class Tls:
    """One process's certificate, and the CA by which it knows others. Files that are replaced are read anew for the
    next connection; what is wrong with them is logged, and the old ones serve on. Thread-safe."""

    def __init__(self, *, ca: str | Path, cert: str | Path, key: str | Path, graph: str, cluster: str) -> None:
        """Raises `RpcError` where a file cannot be used, or the certificate is not that of `cluster` of `graph`, or
        is not valid now."""
        self.graph, self.cluster = graph, cluster
        self._ca, self._cert, self._key = Path(ca), Path(cert), Path(key)
        self._lock = threading.Lock()
        self._seen = self._look()
        self._loaded = self._load()

    @property
    def expires(self) -> float:
        """When the certificate does, or the CA's, in seconds since 1970."""
        return self._loaded.expires

    def __repr__(self) -> str:
        return f"Tls({identity(self.graph, self.cluster)})"

    def session(self, *, server: bool, bios: tuple[ssl.MemoryBIO, ssl.MemoryBIO]) -> ssl.SSLObject:
        """For one connection, between what comes and what goes."""
        seen = self._look()
        if seen != self._seen:
            self._renew(seen)
        return self._loaded.session(server=server, bios=bios)

    def cluster_of(self, certificate: Mapping[str, Any]) -> str:
        """Whose certificate it is. The handshake has checked that the CA signed it. Raises `RpcError` for one of
        another graph."""
        names = certificate.get("subjectAltName", ())
        uris = [urlsplit(value) for kind, value in names if kind == "URI"]
        said = [uri for uri in uris if uri.scheme == SCHEME and uri.path.strip("/")]
        if len(said) == 1 and said[0].netloc == self.graph:
            return str(said[0].path.strip("/"))
        owners = ", ".join(uri.geturl() for uri in said) or "none of a graph"
        raise RpcError(
            "a certificate of another graph was shown",
            why=f"it names {owners}; the side that refuses it is {identity(self.graph, self.cluster)}",
            fix=_FIX,
        )

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What is another when a file is."""

        def of(path: Path) -> tuple[int, int, int] | None:
            try:
                stat = path.stat()
            except OSError:
                return None
            return stat.st_ino, stat.st_size, stat.st_mtime_ns

        return tuple(map(of, (self._ca, self._cert, self._key)))

    def _renew(self, seen: tuple[tuple[int, int, int] | None, ...]) -> None:
        with self._lock:
            if seen == self._seen:
                return
            self._seen = seen
            try:
                self._loaded = self._load()
            except RpcError as error:
                # It may be that one file of the three is new, and the next about to be.
                log.warning("the certificate was replaced, and the old one serves on: %s", error)
            else:
                log.info("the certificate was replaced: %s serves by %s from now on", self.cluster, self._cert)

    def _load(self) -> _Loaded:
        server = _context(ssl.PROTOCOL_TLS_SERVER, self._ca, self._cert, self._key)
        server.num_tickets = 0
        loaded = _Loaded(server, _context(ssl.PROTOCOL_TLS_CLIENT, self._ca, self._cert, self._key), 0.0)
        own = self._check_own(loaded)
        ends = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in (own, *server.get_ca_certs())]
        return replace(loaded, expires=float(min(ends)))

    def _check_own(self, loaded: _Loaded) -> Mapping[str, Any]:
        """By a handshake with itself: what is wrong is told here, before it is told of by every peer. Returns the
        certificate."""
        cert = self._cert
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = loaded.session(server=False, bios=(back, there))
        server = loaded.session(server=True, bios=(there, back))
        left = [client, server]
        try:
            while left:
                for side in list(left):
                    try:
                        side.do_handshake()
                        left.remove(side)
                    except ssl.SSLWantReadError:
                        continue
            own: Mapping[str, Any] = server.getpeercert() or {}
            cluster = self.cluster_of(own)
        except ssl.SSLError as error:
            raise RpcError("this certificate is not to be used", where=str(cert), why=said(error), fix=_FIX) from None
        except RpcError as error:
            raise RpcError(
                "this certificate is not of this graph", where=str(cert), why=error.why, fix=error.fix
            ) from None
        if cluster != self.cluster:
            raise RpcError(
                f'this certificate is of cluster "{cluster}"',
                where=str(cert),
                why=f'the process that shows it is in cluster "{self.cluster}"',
                fix="write {cluster} for the cluster's name in spec.security.tls, so that each shows its own",
            )
        return own


def _context(side: int, ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    path, what = ca, "the CA's certificate"
    try:
        context.load_verify_locations(ca)
        path, what = cert, "the certificate or its key"
        # A key with a password would ask for it on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        where = str(path) if path == ca else f"{cert}, {key}"
        why = said(error) if isinstance(error, ssl.SSLError) else str(getattr(error, "strerror", None) or error)
        raise RpcError(f"{what} cannot be read", where=where, why=why, fix=_FIX) from None
    return context


def said(error: ssl.SSLError) -> str:
    """What an error of TLS means, in words."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate: {error.verify_message}"
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    if "ALERT" in reason or reason.startswith(("SSLV3_ALERT", "TLSV1")):
        alert = reason.partition("ALERT_")[2].replace("_", " ").lower() or reason
        return f"the peer refused this side's certificate or protocol: {alert}"
    if reason in _PLAIN:
        return "it does not speak TLS: what it sent is no record of it"
    return _NOT_OURS.get(reason) or reason.replace("_", " ").lower() or str(error)
