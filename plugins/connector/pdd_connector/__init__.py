"""The engine's side of a pdd-runtime worker: block memory that both share, and what is said about it."""

from pdd_connector.client import AgentClient, Geometry, Refused, Transfer
from pdd_connector.keys import page_key, page_keys

__all__ = ["AgentClient", "Geometry", "Refused", "Transfer", "page_key", "page_keys"]
