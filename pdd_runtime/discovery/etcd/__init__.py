"""The `etcd` discovery: processes that different launchers started find each other, be it in other datacenters."""

from pdd_runtime.discovery.etcd.config import EtcdConfig
from pdd_runtime.discovery.etcd.discovery import EtcdDiscovery, pdd_register_discoveries

__all__ = ["EtcdConfig", "EtcdDiscovery", "pdd_register_discoveries"]
