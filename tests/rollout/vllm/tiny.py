"""A random model of two layers with a byte-level tokenizer of 320 tokens, and a game for it to play.

Being random, it emits any byte; so every stop string, broken character and limit is met within a few turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments.base import StepResult

LAYERS, VOCABULARY, CONTEXT = 2, 320, 256
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
# the class prefix in transformers, and the family's settings besides the common sizes
OF_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "qwen3_5_moe": ("Qwen3_5Moe", HYBRID | MIXTURE),
    "qwen3_next": ("Qwen3Next", HYBRID | MIXTURE | {"tie_word_embeddings": False}),  # vLLM ties none
    "gpt_oss": (
        "GptOss",
        {
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "tie_word_embeddings": False,
        },
    ),
}
CORPUS = [
    "<search>capital of France</search> <information>Doc 1(Title: Paris) Paris is the capital of France.",
    "</information> <answer>Paris</answer> Question: which city is the capital? The user and the assistant.",
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|endoftext|>", eos_token=END)
    tokenizer.chat_template = TEMPLATE
    assert len(tokenizer) == VOCABULARY
    return tokenizer


def build_model(folder: Path, family: str = "qwen3", vocabulary: int = VOCABULARY) -> None:
    tokenizer = build_tokenizer()
    prefix, special = OF_FAMILY[family]
    text = "Text" if prefix.startswith("Qwen3_5") else ""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 128 if family == "qwen2" else 64,  # vLLM divides it by the heads for Qwen2
        **({} if family == "qwen3_5_moe" else {"intermediate_size": 96}),
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    config = getattr(transformers, f"{prefix}{text}Config")(**sizes | special)
    torch.manual_seed(0)
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fill(parameters: dict[str, torch.Tensor], folder: Path, rank: int = 0, size: int = 1) -> None:
    """Copy the checkpoint's rows of tensor rank `rank` of `size` into the engine's parameters."""
    given = load_file(Path(folder) / "model.safetensors")

    def cut(name: str, dim: int) -> torch.Tensor:
        return given[name].chunk(size, dim)[rank]

    def put(name: str, *parts: torch.Tensor) -> None:
        parameters[name].copy_(torch.cat(parts))

    put("model.embed_tokens.weight", cut("model.embed_tokens.weight", 0))
    put("model.norm.weight", given["model.norm.weight"])
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        attention, mlp = at + "self_attn.", at + "mlp."
        put(attention + "qkv_proj.weight", *(cut(f"{attention}{p}_proj.weight", 0) for p in "qkv"))
        put(attention + "o_proj.weight", cut(attention + "o_proj.weight", 1))
        put(mlp + "gate_up_proj.weight", *(cut(f"{mlp}{p}_proj.weight", 0) for p in ("gate", "up")))
        put(mlp + "down_proj.weight", cut(mlp + "down_proj.weight", 1))
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            put(f"{at}{norm}.weight", given[f"{at}{norm}.weight"])


def reference_logprobs(model: Any, ids: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """Return [len(ids) - 1]: the log-prob of each id except the first, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def task(index: int, behave: str = "play") -> Task:
    prompt = (Message("user", f"Question {index}: which city is the capital of France? {'Say. ' * index}"),)
    return Task("game", prompt, ("Paris",), "train", index, {"behave": behave})


class End(BaseException):
    """As test frameworks raise, which graders of code may use."""


class Unreadable(Exception):
    def __str__(self) -> str:
        return self.reason  # type: ignore[attr-defined, no-any-return]  # a slip that hides the real error


class Game:
    """Answers each turn with its length. It ends after three, with reward 1 for an even total length."""

    stop_strings = ("e", "</answer>")

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self.behave, self.actions = task.extra["behave"], []
        if self.behave == "fail at reset":
            raise KeyError("no such board")
        if self.behave == "step is not async":
            self.step = lambda action: None  # type: ignore[assignment, method-assign, return-value]
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        # Later episodes answer first, so that the order of arrival differs from that of submission.
        await asyncio.sleep(0.002 * (len(action) % 3))
        if self.behave == "hang":
            await asyncio.sleep(60)
        if self.behave == "return nothing":
            return None  # type: ignore[return-value]
        if self.behave == "cancel":
            raise asyncio.CancelledError  # of a separate task that it awaited
        if self.behave == "exit":
            raise SystemExit(3)
        if self.behave == "end otherwise":
            raise End("over")
        if self.behave == "interrupt":
            raise KeyboardInterrupt
        if self.behave == "a task exits":
            await asyncio.gather(self._exit())
        if self.behave == "unreadable":
            raise Unreadable
        if self.behave == "raise":
            raise RuntimeError("the board fell over \x1b[31m")
        if len(self.actions) == 3:
            won = sum(map(len, self.actions)) % 2 == 0
            return StepResult("", float(won), True, True, False, "ok" if won else "wrong", action[-8:])
        text = f"\n<information>{len(action)} letters {END}</information>\n"
        return StepResult(text, 0.0, False, True, True)

    async def _exit(self) -> None:
        raise SystemExit(4)

    async def close(self) -> None:
        self.actions.clear()
