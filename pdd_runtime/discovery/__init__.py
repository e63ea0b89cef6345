"""Who is there: the registry that the launcher keeps, and the `local` discovery that asks it; `etcd` for several
hosts."""

from pdd_runtime.discovery.local import LocalDiscovery
from pdd_runtime.discovery.opening import open_discovery
from pdd_runtime.discovery.registry import RegistryServer

__all__ = ["LocalDiscovery", "RegistryServer", "open_discovery"]
