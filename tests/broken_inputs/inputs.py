"""Right inputs, which the tests of wrong ones change: the shape of a model, and a row of a task file."""

from __future__ import annotations

from collections.abc import Callable

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
ROW = {
    "data_source": "test",
    "prompt": [{"role": "user", "content": "Which city?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}},
}
Said = Callable[..., str]
