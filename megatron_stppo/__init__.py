"""ST-PPO for very large multi-turn LLM agents, on megatron-core and vLLM (arXiv 2511.20718)."""

__version__ = "0.1.0"
