"""Tokenizers of the kinds that treat spaces differently: byte level, and "▁" as of Llama 2 in all its forms.

All are trained on one corpus. Those of Llama 2 have a token for each byte, and merges that begin with "▁".
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from tests.rollout.vllm.tiny import build_tokenizer

CORPUS = [
    "the capital of France is Paris. Obs: </a> <search> a b hi hi, the user: [INST] and [/INST]",
    "a capital, the city of France? is Paris: 12 and 3.  Obs: a",
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def _trained() -> dict[str, Any]:
    """Return vocabulary and merges: the special tokens, a token per byte, then a merged pair per line."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*map(chr, range(33, 127)), "▁"]
    core.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=letters)
    )
    model: dict[str, Any] = json.loads(core.to_str())["model"]
    return model


MODEL = _trained()


def _core() -> Tokenizer:
    merges = [tuple(pair) for pair in MODEL["merges"]]
    core = Tokenizer(models.BPE(MODEL["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def _complete(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens(SPECIAL)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def prepending() -> PreTrainedTokenizerFast:
    """As in the tokenizer.json of Llama 2, TinyLlama and Mixtral."""
    core = _core()
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _complete(core)


def metaspace(scheme: str, split: bool) -> PreTrainedTokenizerFast:
    core = _core()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    if split or scheme == "never":
        spaces = decoders.Metaspace(prepend_scheme=scheme)
        core.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return _complete(core)


def llama(legacy: bool) -> LlamaTokenizer:
    """As transformers builds it from the vocabulary."""
    merges = [tuple(pair) for pair in MODEL["merges"]]
    tokenizer = LlamaTokenizer(vocab=MODEL["vocab"], merges=merges, legacy=legacy)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


KINDS: dict[str, Any] = {
    "byte level": build_tokenizer(),
    "prepend": prepending(),
    "always": metaspace("always", split=False),
    "first": metaspace("first", split=False),
    "never": metaspace("never", split=False),
    "split, first": metaspace("first", split=True),
    "legacy": llama(legacy=True),
    "not legacy": llama(legacy=False),
}
