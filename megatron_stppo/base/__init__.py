"""Records, errors with exit codes, files."""
