"""Writes model/: a Qwen3 of 0.1 M random parameters, and a tokenizer whose tokens are bytes.

In the project of an agent, frequent parts of its demonstrations are tokens too, and a cold start teaches
them.

It takes the place of a real checkpoint, so that the project runs without a download. To train a real one,
set model.path in config.yaml to its folder.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEMONSTRATIONS = Path("demonstrations.py")
texts, folder = [], "model"
if DEMONSTRATIONS.exists():
    subprocess.run([sys.executable, DEMONSTRATIONS], check=True)
    rows = map(json.loads, DEMONSTRATIONS.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines())
    texts, folder = [message["content"] for row in rows for message in row["messages"]], "untrained"

tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokens.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
tokens.train_from_iterator(texts, trainer)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens,
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
        initializer_range=0.1 if texts else 0.02,  # with 0.02 a cold start this short teaches no attention
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(f"{folder}/: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
if texts:
    command = [sys.executable, "-m", "megatron_stppo", "cold-start", "config.yaml", f"model.path={folder}"]
    subprocess.run(command, check=True)
