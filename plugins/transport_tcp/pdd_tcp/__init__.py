"""Bulk KV over TCP: receiver-driven, resumable, checksummed, from block memory to block memory."""
