"""The graph under a workload, simulated: what `up` and `bench` would find, without the machines."""

from __future__ import annotations
