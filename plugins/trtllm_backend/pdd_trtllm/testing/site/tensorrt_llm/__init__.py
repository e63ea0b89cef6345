"""Stands in for TensorRT-LLM where a server is started on this directory in PYTHONPATH."""

__version__ = "1.2.1"
STAND_IN = True
