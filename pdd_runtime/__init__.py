"""pdd-runtime: prefill, relay decode and main decode over several datacenters."""

__version__ = "0.1.0"
