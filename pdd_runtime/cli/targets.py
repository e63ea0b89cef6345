"""What is to be measured, as it is named on the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.validate import load_checked
from pdd_runtime.errors import PddError
from pdd_runtime.experiments import Target

_FOR_ONE = re.compile(r"([A-Za-z0-9_.-]+):(?=[A-Za-z]+[.=])")
"""`pd-cross:spec.links…=…`: an override of one graph, by its file's name."""
_ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):\d+(?:/v1)?/?")
"""`localhost:8000`."""
OWN_FRONTEND = (
    *("spec.frontend.host=127.0.0.1", "spec.frontend.port=0"),
    *("spec.frontend.admin=null", "spec.frontend.keys=null", "spec.frontend.tls=null"),
)
"""A graph that is up for a measurement only is for this process alone."""


class UsageError(PddError):
    """Arguments that do not go together."""

    code = "usage"


def bench_targets(
    graphs: Sequence[Path], url: str | None, overrides: Sequence[str], consoles: Consoles
) -> list[Target]:
    """Of `bench`: each is called as its graph is. Raises `GraphError`, `PluginError` and `UsageError`."""
    if url is None and not graphs:
        raise UsageError("there is nothing to measure", fix="name a graph's file, or a running graph by --url")
    if url is not None and len(graphs) > 1:
        raise UsageError("one --url is one graph, but several are named", fix="name its own graph only, or none")
    base = None if url is None else base_of(url)
    split = Overrides(overrides, {path.stem for path in graphs})
    targets: list[Target] = []
    for path in graphs:
        loaded, _ = load_checked(path, [*split.of(path.stem), *OWN_FRONTEND], consoles)
        if loaded.graph.name in [target.name for target in targets]:
            raise UsageError(
                f"two graphs are called {loaded.graph.name}",
                where=str(path),
                fix=f"call one otherwise: --set {path.stem}:metadata.name=NAME, or in its file",
            )
        targets.append(Target(loaded.graph.name, loaded.graph, str(path), base or ""))
    return targets or [Target(str(base), None, url=str(base))]


def ab_targets(named: Sequence[str], overrides: Sequence[str], consoles: Consoles) -> list[Target]:
    """Of `ab`: they are called A, B, C and so on. Raises `GraphError`, `PluginError` and `UsageError`."""
    if not 2 <= len(named) <= len(_LETTERS):
        raise UsageError(
            "a test needs something to compare",
            why=f"{len(named)} named, from 2 to {len(_LETTERS)} can be",
            fix="name two graphs' files or URLs; where it is the same file, --set B:PATH=VALUE makes a difference",
        )
    letters = dict(zip(_LETTERS, named, strict=False))
    split = Overrides(overrides, {*letters, *(Path(one).stem for one in named if not is_url(one))})
    targets = []
    for letter, one in letters.items():
        if is_url(one):
            if split.only(letter):
                raise UsageError(f"{letter} runs already: --set cannot change it", where=one)
            targets.append(Target(letter, None, base_of(one), base_of(one)))
        else:
            changes = [*split.of(letter, Path(one).stem), *OWN_FRONTEND]
            loaded, _ = load_checked(Path(one), changes, consoles)
            targets.append(Target(letter, loaded.graph, one))
    return targets


_LETTERS = "ABCDEFGH"


class Overrides:
    """`--set` for all graphs, or with a name and a colon before it for one."""

    def __init__(self, overrides: Iterable[str], names: Collection[str]) -> None:
        """Raises `UsageError` for one that is for none of `names`."""
        self._shared: list[str] = []
        self._single: list[tuple[str, str]] = []
        for override in overrides:
            match = _FOR_ONE.match(override)
            if match is None:
                self._shared.append(override)
            elif match[1] in names:
                self._single.append((match[1], override[match.end() :]))
            else:
                known = ", ".join(sorted(names)) or "none"
                raise UsageError(f'--set is for "{match[1]}", which is not measured', fix=f"the graphs are {known}")

    def of(self, *names: str) -> list[str]:
        """What holds for a graph that goes by these names; what is for it alone comes last."""
        return [*self._shared, *self.only(*names)]

    def only(self, *names: str) -> list[str]:
        return [override for name, override in self._single if name in names]


def is_url(text: str) -> bool:
    """Also where the scheme is left out, and no such file is there."""
    return "://" in text or (bool(_ADDRESS.fullmatch(text)) and not Path(text).exists())


def base_of(url: str) -> str:
    """As people paste it: with or without a scheme, or as OpenAI clients want it, with /v1."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")
