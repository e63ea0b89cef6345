"""Engines that run inside the worker process: all of one but the model, which a plugin brings as a `Runner`."""

from __future__ import annotations

from pdd_runtime.inprocess.chunk import Chunk
from pdd_runtime.inprocess.config import InProcessConfig
from pdd_runtime.inprocess.engine import InProcessEngine
from pdd_runtime.inprocess.runner import Runner, fingerprint

__all__ = ["Chunk", "InProcessConfig", "InProcessEngine", "Runner", "fingerprint"]
