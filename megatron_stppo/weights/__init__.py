"""Rows on ranks, and the reshard."""
