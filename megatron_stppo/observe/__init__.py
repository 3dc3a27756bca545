"""Metrics, logs, the HTML page."""
