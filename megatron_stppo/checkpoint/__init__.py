"""Saving, loading, exporting."""
