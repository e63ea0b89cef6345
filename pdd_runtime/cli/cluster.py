"""`up --cluster`: one cluster's part of a graph, and the secret that all parts share."""

from __future__ import annotations

import os
from pathlib import Path

from pdd_runtime.errors import GraphError, LaunchError
from pdd_runtime.graph import LoadedGraph, nearest
from pdd_runtime.launch import Part
from pdd_runtime.plugins import PluginManager

SECRET = "PDD_SECRET"
"""Environment: the secret."""
_SHORTEST = 16


def part_of(loaded: LoadedGraph, plugins: PluginManager, cluster: str | None, secret_file: Path | None) -> Part:
    """What to run; of no cluster in particular: all. Raises `GraphError` and `LaunchError`."""
    if cluster is None:
        if secret_file is not None:
            raise LaunchError(
                "a secret is for the parts of a graph that several launchers run",
                why="one launcher for all makes a secret of its own",
                fix="add --cluster NAME, or leave --secret-file out",
            )
        return Part()
    graph, spec = loaded.graph, loaded.graph.spec
    if cluster not in spec.clusters:
        raise GraphError(
            f'there is no cluster "{cluster}"',
            where=loaded.locate(("spec", "clusters")),
            why=f"the clusters are: {', '.join(spec.clusters)}",
            fix=nearest(cluster, spec.clusters) or "name one of them",
        )
    if cluster not in graph.frontend_clusters and all(pool.cluster != cluster for pool in spec.pools.values()):
        raise GraphError(
            f'nothing runs in cluster "{cluster}"',
            where=loaded.locate(("spec", "clusters", cluster)),
            why="no pool stands in it, nor the frontend",
            fix="name a cluster that has a pool",
        )
    if not plugins.discovery(spec.discovery.plugin).across_hosts:
        raise GraphError(
            f"discovery {spec.discovery.plugin} finds only what one launcher started",
            where=loaded.locate(("spec", "discovery", "plugin")),
            why=f"with --cluster {cluster} the other clusters have launchers of their own",
            fix="set discovery: {plugin: etcd, config: {endpoints: [http://HOST:2379]}} for all of them",
        )
    return Part(cluster, _secret(secret_file))


def _secret(file: Path | None) -> str:
    try:
        secret = file.read_text().strip() if file is not None else os.environ.get(SECRET, "")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            "the secret cannot be read", where=str(file), why=str(error), fix="name a text file that you can read"
        ) from error
    if len(secret) < _SHORTEST:
        raise LaunchError(
            "the clusters' launchers need a secret that they share",
            where=str(file or f"environment variable {SECRET}"),
            why=f"it has {len(secret)} characters, and wants {_SHORTEST}" if secret else "it is not set",
            fix="make one with `openssl rand -hex 32`, the same for every cluster, and give it as "
            f"{SECRET} or by --secret-file",
        )
    return secret
