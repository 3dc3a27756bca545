"""megatron-core models."""
