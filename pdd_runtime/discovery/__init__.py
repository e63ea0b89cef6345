"""Who is there: the registry that the launcher keeps, and the `local` discovery that asks it."""

from pdd_runtime.discovery.local import LocalDiscovery
from pdd_runtime.discovery.registry import RegistryServer

__all__ = ["LocalDiscovery", "RegistryServer"]
