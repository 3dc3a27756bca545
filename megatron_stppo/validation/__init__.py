"""Checks of a configuration."""
