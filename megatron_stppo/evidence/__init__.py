"""Audit, layouts, comparisons."""
