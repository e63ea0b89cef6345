"""What TensorRT-LLM's scheduler tells its workers of one forward pass: plain data, pickled for other ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Copy offered KV into the engine before the pass."""

    transfer: str
    pages: tuple[int, ...]
    blocks: tuple[int, ...]
    """One a page: where its KV lies."""
    tokens: int
    """In these pages, from the first one's first token on: the last page may be filled in part."""


@dataclass(frozen=True)
class Save:
    """After the pass, the KV of a request's first tokens lies in its pages."""

    request: int
    """The engine's own id."""
    transfer: str
    pages: tuple[int, ...]
    """Those that are new since the last pass, in order of position."""
    ready: int
    """Tokens to publish: all of a prompt once it is computed, later whole pages."""
    computed: int
    """Tokens whose KV lies in the pages: what is published of a request that ends behind this pass."""


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    gone: tuple[int, ...] = ()
    """Requests that were aborted: from this pass on their pages may be others'."""
