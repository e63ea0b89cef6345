"""The base classes of KV connectors."""

from pdd_trtllm.testing.connector_bases import KvCacheConnectorScheduler, KvCacheConnectorWorker

__all__ = ["KvCacheConnectorScheduler", "KvCacheConnectorWorker"]
