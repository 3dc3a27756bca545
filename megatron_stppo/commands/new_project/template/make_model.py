"""Writes model/: a Qwen3 of 0.1 M random parameters, and a tokenizer whose tokens are bytes.

It takes the place of a real checkpoint, so that the project runs without a download. To train a real one,
set model.path in config.yaml to its folder.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FOLDER = "model"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

bytes_only = Tokenizer(models.BPE())
bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_only.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
bytes_only.train_from_iterator([], trainer)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bytes_only,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    chat_template=CHAT_TEMPLATE,
    model_max_length=256,
)
torch.manual_seed(0)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
)
model.save_pretrained(FOLDER)
tokenizer.save_pretrained(FOLDER)
print(f"{FOLDER}/: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
