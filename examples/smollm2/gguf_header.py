"""Reads a GGUF file's metadata, and makes config.json and the files of the tokenizer of it.

The keys are those of llama.cpp's specification (ggml's gguf.md). Every key of the architecture is either
read or known to change nothing. Any other one is refused, because it may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import AutoTokenizer

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_fields import SCALED, SCALING
from megatron_stppo.weights.sharding.hf_names import families

# Architectures in GGUF files, and the model_type of each without experts and with experts.
ARCHITECTURES = {
    "llama": ("llama", "mixtral"),
    "qwen2": ("qwen2", "qwen2"),
    "qwen3": ("qwen3", "qwen3"),
    "qwen3moe": ("qwen3_moe", "qwen3_moe"),
}
# Keys of an architecture, without its name, and the field of config.json that each becomes.
FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
READ = {"expert_count", "attention.value_length", "rope.dimension_count", "rope.scaling.type"}
IGNORED = {"vocab_size"}  # the rows of the embedding say it
REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")

# How a vocabulary's merges were learned, by llama.cpp's name of it (tokenizer.ggml.pre). transformers does
# not divide numbers into digits for smollm, and guesses for a name that it does not know.
BY_DIGIT: PreTokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
KNOWN = ("default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "smollm")


class Header:
    """An open GGUF file: `values`, its metadata, and `tensors`, by their names in the file."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError if the file cannot be read, or has an architecture that is not supported."""
        self.file = file
        with self.one_line("is not a complete GGUF file"):
            reader = GGUFReader(file)
            self.values: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.values.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise self.refusal(f"architecture {self.architecture!r} is not supported", sorted(ARCHITECTURES))
        if self.values.get("split.count", 1) != 1:
            raise self.refusal(f"is one of {self.values['split.count']} parts; merge them with gguf-split")
        self.experts = int(self.values.get(f"{self.architecture}.expert_count", 0))
        self.family = families()[ARCHITECTURES[self.architecture][self.experts > 0]]

    @contextmanager
    def one_line(self, problem: str) -> Iterator[None]:
        """Turn what a reader raises for wrong bytes into a ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"FILE={self.file}: cannot be read ({error.strerror}); correct the path"
            ) from None
        except Exception as error:  # gguf checks nothing, so that wrong bytes may raise anything
            raise self.refusal(f"{problem} ({type(error).__name__}: {str(error)[:200]})") from None

    def refusal(self, problem: str, choices: list[str] | None = None) -> ConfigError:
        remedy = f"choose one of {choices}" if choices else "fetch it again, or use a Hugging Face folder"
        return ConfigError(f"FILE={self.file}: {problem}; {remedy}".replace("\n", " "))

    def config(self) -> dict[str, Any]:
        """Return the fields of config.json. Raises ConfigError for a key that may change the model."""
        prefix = f"{self.architecture}."
        given = {name.removeprefix(prefix): v for name, v in self.values.items() if name.startswith(prefix)}
        for key, value in given.items():
            if key not in {*FIELDS, *READ, *IGNORED}:
                raise self.refusal(f"{prefix}{key}={str(value)[:80]} is not supported")
        for key in REQUIRED:
            if key not in given:
                raise self.refusal(f"has no {prefix}{key}")
        if "token_embd.weight" not in self.tensors:
            raise self.refusal("has no tensor token_embd.weight")
        fields = {FIELDS[key]: _shortest(value) for key, value in given.items() if key in FIELDS}
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        size = fields.setdefault("head_dim", hidden // heads)
        for key, plain in (
            ("attention.value_length", size),
            ("rope.dimension_count", size),
            ("rope.scaling.type", "none"),
        ):
            if given.get(key, plain) != plain:
                raise self.refusal(f"{prefix}{key}={given[key]!r} is not supported, only {plain!r}")
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("rope_theta", 10000.0)
        if self.experts:
            mixtral = self.family.model_type == "mixtral"
            fields["num_local_experts" if mixtral else "num_experts"] = self.experts
        if not self.family.always_renormalised:
            fields["norm_topk_prob"] = True  # as llama.cpp computes this architecture
        rope = fields.pop("rope_theta")
        return fields | {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "hidden_act": "silu",
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "rope_parameters": {"rope_theta": rope} | self._scaling(rope, size),
        }

    def _scaling(self, base: float, size: int) -> dict[str, Any]:
        """Return the settings of rotary embeddings, which SCALED ones have as a tensor of divisors.

        Its formula (Llama 3.1): a frequency whose wavelength is below original / high_freq_factor stays, one
        above original / low_freq_factor is divided by the factor, in between both are mixed.
        """
        if "rope_freqs.weight" not in self.tensors:
            return {"rope_type": "default"}
        found = np.asarray(self.tensors["rope_freqs.weight"].data, dtype=np.float32).astype(np.float64)
        factor, (low, high, original) = float(found.max()), SCALING.values()
        wavelength = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
        mixed = np.clip((original / wavelength - low) / (high - low), 0, 1)
        expected = 1 / ((1 - mixed) / factor + mixed)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
            raise self.refusal(f"rope_freqs.weight is not the scaling {SCALED} with its published constants")
        return {"rope_type": SCALED, "factor": factor} | SCALING


def _shortest(value: Any) -> Any:
    """Return the decimal number that a float32 was written from. Example: 9.99999974e-06 becomes 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


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
