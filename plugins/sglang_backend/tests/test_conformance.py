from pdd_sglang.conformance import TestSglang, model

__all__ = ["TestSglang", "model"]
