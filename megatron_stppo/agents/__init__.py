"""The endpoint for agents."""
