"""Tasks, text, packing."""
