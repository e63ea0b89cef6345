"""Block names, layouts, and the store that holds the blocks of one worker."""

from pdd_runtime.kv.layout import KvLayout
from pdd_runtime.kv.names import Block, chain, child, seed
from pdd_runtime.kv.store import BlockStore, Match, Stats

__all__ = ["Block", "BlockStore", "KvLayout", "Match", "Stats", "chain", "child", "seed"]
