"""The search for the best graph: bounds first, short simulations next, long ones for what is shown."""

from __future__ import annotations
