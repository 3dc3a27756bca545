"""The loop and its stages."""
