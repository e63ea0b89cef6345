"""A certificate authority for development, and the certificates of a graph's clusters by it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from pdd_runtime.errors import LaunchError
from pdd_runtime.rpc import identity

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise LaunchError(
        "certificates cannot be made here",
        why=f"cryptography is not installed: {missing}",
        fix='pip install "pdd-runtime[certs]"',
    ) from None

CA = "ca"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SLACK = timedelta(minutes=5)
"""Hosts' clocks differ."""


class Certificate(NamedTuple):
    """What one certificate says."""

    file: Path
    identity: str
    """`pdd://GRAPH/CLUSTER`; of a CA, its name."""
    since: datetime
    until: datetime
    issuer: str
    fingerprint: str
    """SHA-256."""

    @property
    def valid(self) -> bool:
        """Now."""
        return self.since <= datetime.now(UTC) < self.until


class Authority:
    """Signs. Its key is made with it, and nowhere else until `save`."""

    def __init__(self, graph: str, days: float) -> None:
        self.graph, self._days = graph, days
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pdd-runtime development CA of {graph}")])
        self.certificate = (
            _builder(self._name, self._name, self._key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def save(self, directory: Path) -> list[Path]:
        return _save(directory, CA, self._key, self.certificate)

    def issue(self, directory: Path, cluster: str, *, graph: str = "", days: float | None = None) -> list[Path]:
        """A key and a certificate for the processes of a cluster; `days`, below 0 too, instead of the CA's own."""
        key = ec.generate_private_key(ec.SECP256R1())
        uri = identity(graph or self.graph, cluster)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{graph or self.graph}/{cluster}"[:64])])
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = self._key.public_key()
        certificate = (
            _builder(subject, self._name, key, self._days if days is None else days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _save(directory, cluster, key, certificate)


def make(directory: Path, graph: str, clusters: Sequence[str], days: float, *, force: bool) -> list[Path]:
    """The CA and a certificate for each cluster; returns the files. Raises `LaunchError`, having written nothing where
    one of them is there already."""
    for name in (graph, *clusters):
        if not _NAME.fullmatch(name) or name == CA:
            raise LaunchError(
                f'"{name}" is no name of a graph or a cluster, or is the CA\'s',
                fix="write lower-case letters, digits and dashes, other than ca",
            )
    there = [path for name in (CA, *clusters) for path in _files(directory, name) if path.exists()]
    if there and not force:
        raise LaunchError(
            f"{there[0].name} is there already",
            where=str(directory),
            why="whoever trusts the certificates that are there would not trust new ones",
            fix="name another directory; --force replaces all of them",
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority(graph, days)
        return [*authority.save(directory), *(f for each in clusters for f in authority.issue(directory, each))]
    except OSError as error:
        raise LaunchError(
            "the certificates cannot be written", where=str(directory), why=str(error), fix="name another directory"
        ) from error


def read(directory: Path) -> list[Certificate]:
    """Those in a directory, the CA's first. Raises `LaunchError` where there is none, or one that cannot be read."""
    files = sorted(directory.glob("*.pem"), key=lambda path: (path.stem != CA, path.name))
    if not files:
        raise LaunchError(
            "there are no certificates", where=str(directory), fix="make them with `pdd-runtime certs init`"
        )
    return [_read(path) for path in files]


def _read(path: Path) -> Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LaunchError("this is no certificate", where=str(path), why=str(error)) from error
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        said = ", ".join(names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        said = ""
    return Certificate(
        file=path,
        identity=said or certificate.subject.rfc4514_string(),
        since=certificate.not_valid_before_utc,
        until=certificate.not_valid_after_utc,
        issuer=certificate.issuer.rfc4514_string(),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    time = datetime.now(UTC)
    until = time + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(time, until) - _SLACK)
        .not_valid_after(until)
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _files(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def _save(directory: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> list[Path]:
    public, private = _files(directory, name)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # Never readable by others, not even for a moment; and a file that is replaced may have been.
    private.unlink(missing_ok=True)
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
    public.write_bytes(certificate.public_bytes(pem))
    return [public, private]
