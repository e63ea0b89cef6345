"""Secrets in texts that are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

HIDDEN = "***"
"""Stands for a secret wherever something is shown."""
SHORTEST = 6
"""Characters of a value that is hidden in what processes say: shorter ones are words of any text."""


def to_hide(secrets: Iterable[str]) -> tuple[str, ...]:
    """What of them is to be looked for in a line: each line of theirs, the longest first."""
    lines = {line for secret in secrets for line in secret.splitlines() if len(line) >= SHORTEST}
    return tuple(sorted(lines, key=lambda line: (-len(line), line)))


def hidden(text: str, lines: Sequence[str]) -> str:
    """Without any of `lines`, from `to_hide`."""
    for line in lines:
        text = text.replace(line, HIDDEN)
    return text
