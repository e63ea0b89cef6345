"""The one maker of identifiers."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """A fresh identifier, e.g. `req-5f2b…`: 64 random bits, unguessable, no two of a prefix alike."""
    return f"{prefix}-{secrets.token_hex(8)}"
