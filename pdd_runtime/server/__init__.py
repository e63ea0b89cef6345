"""Engines that are servers of their own: a worker starts or finds one, speaks HTTP with it, and shares memory with the
connector inside it."""
