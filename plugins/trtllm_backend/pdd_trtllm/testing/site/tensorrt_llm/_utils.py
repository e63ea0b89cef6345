"""Which rank this is."""

from pdd_trtllm.testing.ranks import mpi_rank

__all__ = ["mpi_rank"]
