"""vLLM, and episodes on it."""
