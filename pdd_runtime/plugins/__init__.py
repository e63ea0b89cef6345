"""The contracts that plugins implement, and the manager that finds them."""

from __future__ import annotations

from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_runtime.plugins.manager import PluginManager, load_plugins

__all__ = ["PluginManager", "hookimpl", "load_plugins"]
