"""Bulk KV over RDMA, through NIXL: one-sided reads from block memory to block memory."""
