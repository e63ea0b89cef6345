"""The session driver: a request's way through prefill, relay and main."""

from __future__ import annotations

from pdd_runtime.pipeline.driver import Driver
from pdd_runtime.pipeline.request import Finish, SessionRequest

__all__ = ["Driver", "Finish", "SessionRequest"]
