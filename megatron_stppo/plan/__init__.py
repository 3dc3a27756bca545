"""Memory and time, predicted."""
