"""`pdd-runtime certs`: certificates for a graph's own TLS."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from pdd_runtime.cli.certificates import CA, Certificate, make, read
from pdd_runtime.cli.console import FAILED, OK, Consoles
from pdd_runtime.graph import Graph, document, load


def names_in(file: Path) -> tuple[str, list[str]]:
    """A graph's name and its clusters', also where it leaves the host and has no certificates yet. Raises
    `GraphError`."""
    try:
        graph = Graph.model_validate_json(json.dumps(document.read(file).data), strict=True)
    except ValidationError:
        # This says what is wrong, and where.
        graph = load(file).graph
    return graph.name, list(graph.spec.clusters)


def init(directory: Path, graph: str, clusters: list[str], days: float, force: bool, as_json: bool) -> int:
    """Make them. Raises `LaunchError`."""
    files = make(directory, graph, clusters, days, force=force)
    consoles = Consoles()
    if as_json:
        consoles.json({"graph": graph, "clusters": clusters, "files": [str(path) for path in files]})
        return OK
    out = consoles.out
    for path in files:
        out.print(str(path), markup=False, soft_wrap=True)
    out.print(
        "\nIn the graph, where paths are relative to its file:\n\n"
        f'  security: {{tls: {{ca: {directory}/{CA}.pem, cert: "{directory}/{{cluster}}.pem", '
        f'key: "{directory}/{{cluster}}.key"}}}}\n\n'
        f"A host needs {CA}.pem, and the .pem and .key of its cluster. Keep {CA}.key from all of them: who has it "
        "can make more.",
        markup=False,
        soft_wrap=True,
    )
    return OK


def show(directory: Path, as_json: bool) -> int:
    """List them. The exit code says whether all are valid now. Raises `LaunchError`."""
    certificates, consoles = read(directory), Consoles()
    if as_json:
        consoles.json([_plain(each) for each in certificates])
    else:
        table = Table("file", "who", "valid until", "SHA-256", box=None, pad_edge=False)
        for each in certificates:
            until = f"{each.until:%Y-%m-%d %H:%M} UTC" + ("" if each.valid else " (not valid now)")
            table.add_row(each.file.name, each.identity, until, each.fingerprint[:16] + "…")
        consoles.out.print(table)
    return OK if all(each.valid for each in certificates) else FAILED


def _plain(certificate: Certificate) -> dict[str, object]:
    return {
        "file": str(certificate.file),
        "identity": certificate.identity,
        "issuer": certificate.issuer,
        "since": certificate.since.isoformat(),
        "until": certificate.until.isoformat(),
        "valid": certificate.valid,
        "sha256": certificate.fingerprint,
    }
