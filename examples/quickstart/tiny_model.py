"""A byte-level BPE tokenizer and a randomly initialised Qwen3 small enough for two CPU cores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# One token each, but not special tokens: the engine must output them as text to match stop strings.
TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], tags: Sequence[str] = TAGS, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most VOCABULARY entries.

    VOCABULARY is the size of the model's vocabulary, which is divided evenly among tensor parallel ranks.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(tags),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def name_pieces(tokenizer: PreTrainedTokenizerFast) -> tuple[list[str], list[str]]:
    """Return the vocabulary entries for made-up names: those that begin a capital word or continue one."""
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    return (
        [text.strip() for text in texts if re.fullmatch(r" [A-Z][a-z]*", text)],
        [text for text in texts if re.fullmatch(r"[a-z]{1,4}", text)],
    )


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write a random model of 0.7 M parameters. It has 2 key-value heads, so tensor parallelism is 1 or 2."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
