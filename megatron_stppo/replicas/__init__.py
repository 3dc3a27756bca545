"""Asynchronous training."""
