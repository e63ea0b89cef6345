"""Block names, layouts and their conversion, and the store that holds the blocks of one worker."""

from pdd_runtime.kv.cached_names import CachedNames
from pdd_runtime.kv.convert import Conversion, Run, obstacle
from pdd_runtime.kv.layout import KvLayout
from pdd_runtime.kv.names import Block, chain, child, seed
from pdd_runtime.kv.store import BlockStore, Match, Stats

__all__ = [
    "Block",
    "BlockStore",
    "CachedNames",
    "Conversion",
    "KvLayout",
    "Match",
    "Run",
    "Stats",
    "chain",
    "child",
    "obstacle",
    "seed",
]
