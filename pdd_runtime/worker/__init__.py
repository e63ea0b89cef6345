"""The worker process: an engine's host, and the KV agent beside the engine."""
