"""The tokenizer of a GGUF file, as the files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import AutoTokenizer

from megatron_stppo.weights.gguf.header import Header

# How a vocabulary's merges were learned, by llama.cpp's name of it (tokenizer.ggml.pre). transformers does
# not divide numbers into digits for smollm, and guesses for a name that it does not know.
BY_DIGIT: PreTokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
KNOWN = ("default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "smollm")


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template to the folder.

    Raises ConfigError if the file has no tokenizer, or one that cannot be built.
    """
    model, pre = (header.values.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in ("gpt2", "llama"):
        raise header.refusal(f"tokenizer.ggml.model={model!r} is not supported", ["gpt2", "llama"])
    if model == "gpt2" and pre not in KNOWN:
        raise header.refusal(f"tokenizer.ggml.pre={pre!r} is not supported", sorted(KNOWN))
    with header.one_line("its tokenizer cannot be built"):
        tokenizer = AutoTokenizer.from_pretrained(
            header.file.parent, gguf_file=header.file.name, trust_remote_code=False
        )
        if pre == "smollm":
            tokenizer.backend_tokenizer.pre_tokenizer = BY_DIGIT
        tokenizer.save_pretrained(folder)
