"""The model of a case and its tokenizer, written once and read by both trainers.

No model generates the end-of-text token, so every turn is as long as the limit allows. In a random Qwen3,
dimension 0 of the residual stream is large and positive, and only end-of-text has a negative weight on it.
In SmolLM2, another token becomes the end-of-text token.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tools.peers.cases import Size

VOCABULARY = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# SmolLM2-135M-Instruct gave it a mean probability of 1.3e-9 in 480 tokens sampled after game.question.
NEVER = "<filename>"
# A tool's answer is rendered as plain text, so that it has the same tokens in both trainers. TRL requires
# that a template can also render a tool call.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ m['content'] }}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}{{ c['function']['name'] }} {{ c['function']['arguments'] }}"
    "{% endfor %}<|im_end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}\n<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, size: Size) -> int:
    """Write config, weights and tokenizer to `folder`; return the number of parameters."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0] = 1.0
    embedding[tokenizer.eos_token_id, 0] = -100.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def adapt(folder: Path, source: Path) -> int:
    """Write the model of `source` to `folder` in float32, ending at NEVER; return its number of parameters.

    Its chat template becomes TEMPLATE, because TRL requires one that can render tools. Raises RuntimeError
    for a folder without a model, and for a model without the token NEVER.
    """
    if not (source / "config.json").exists():
        raise RuntimeError(f"--model={source}: has no config.json; `make smollm2` imports a model")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if NEVER not in tokenizer.get_vocab():
        raise RuntimeError(f"--model={source}: has no token {NEVER}; give SmolLM2-135M-Instruct")
    tokenizer.eos_token, tokenizer.pad_token = NEVER, SPECIAL[0]
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of exactly VOCABULARY entries, learned from random syllables."""
    draw = random.Random(0)
    syllables = [a + b + c for a in "bdfgklmnprstv" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(4000)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([" ".join(words)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=TEMPLATE
    )
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    return tokenizer
