"""Train with TRL's GRPO and report seconds and tokens of every iteration. Runs in a separate environment.

    python tools/peers/trl_side.py SPECIFICATION.json RESULT.json

These settings differ from TRL's defaults:

    - float32, as on the other side
    - no gradient checkpointing and no logging, which would only cost time
    - no early stop

One generation is used for four optimizer steps. So TRL computes the old log-probs, as the other side does.
beta=0 (TRL's default) means that there is no reference model.

benchmark_trees gives episodes: [prompt, completion, mask of its action tokens], which take the place of
generation. The rest is then measured: log-probs of the old policy if there are several steps, and the update.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")

import torch
from datasets import Dataset
from game import OBSERVATION, question, reward
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

TOOL = "look"


class House:
    """The task as an environment of TRL: one tool, which always gives the same answer."""

    def reset(self, **_: object) -> None:
        return None

    def look(self) -> str:
        """Look around."""
        return OBSERVATION


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Clock(TrainerCallback):
    """Record the time at which each optimizer step ends, and the processor's."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(now())


class Timed(GRPOTrainer):
    """GRPOTrainer that records the seconds, the end and the tokens of every generation."""

    episodes: list[tuple[list[int], list[int], list[int]]] | None
    generations: list[dict[str, float]]
    generated: list[tuple[float, float]]

    def _generate(self, prompts):
        start = time.perf_counter()
        out = super()._generate(prompts) if self.episodes is None else self._given(prompts)
        prompt_ids, completion_ids, tool_mask = out[:3]
        written = sum(map(sum, tool_mask)) if tool_mask else sum(map(len, completion_ids))
        read = sum(map(len, prompt_ids)) + sum(map(len, completion_ids)) - written
        self.generated.append(now())
        seconds = self.generated[-1][0] - start
        self.generations.append({"generation": seconds, "written": written, "read": read})
        return out

    def _given(self, prompts):
        assert len(prompts) == len(self.episodes), (len(prompts), len(self.episodes))
        parts = ([list(ids) for ids in part] for part in zip(*self.episodes, strict=True))
        return *parts, [""] * len(prompts), None, {}, None, []


def rewards(completions, **_: object) -> list[float]:
    return [reward("".join(m["content"] for m in c if m["role"] == "assistant")) for c in completions]


def always_call(tokenizer, ids, prefix=None, tools=None):
    """Replace TRL's parser: random weights generate no tool call, so every turn is treated as one."""
    call = {"type": "function", "function": {"name": TOOL, "arguments": {}}}
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def main(specification: Path, result: Path) -> None:
    given = json.loads(specification.read_text(encoding="utf-8"))
    torch.set_num_threads(given["threads"])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    share = given["trajectories"] // given["steps"] // world  # trajectories per optimizer step and process
    rows = given["amount"] or share
    turns, turn_tokens = given["turns"], given["turn_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(given["model"], trust_remote_code=False)
    config = GRPOConfig(
        output_dir=str(result.parent / "trl"),
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=share // rows,
        steps_per_generation=share // rows * given["steps"],
        num_generations=given["samples"],
        max_steps=given["iterations"] * given["steps"],
        max_completion_length=1000,
        generation_kwargs={"max_new_tokens": turn_tokens},
        max_tool_calling_iterations=turns - 1 if turns > 1 else None,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
        model_init_kwargs={"dtype": "float32"},
    )
    several = {}
    if turns > 1:
        tokenizer.response_template = {}  # TRL only checks whether it exists
        grpo_trainer.parse_response = always_call
        several = {"environment_factory": House}
    if given["lora"]:  # alpha is the default of the other side
        several["peft_config"] = LoraConfig(r=given["lora"], lora_alpha=32, target_modules="all-linear")
    episodes, clock = given["episodes"], Clock()
    ask = str if episodes else lambda n: [{"role": "user", "content": question(n)}]
    trainer = Timed(
        model=given["model"],
        args=config,
        reward_funcs=rewards if episodes is None else lambda completions, **_: given["rewards"],
        train_dataset=Dataset.from_list([{"prompt": ask(n)} for n in range(given["tasks"])]),
        processing_class=tokenizer,
        callbacks=[clock],
        **several,
    )
    trainer.episodes, trainer.generations, trainer.generated = episodes, [], []
    trainer.train()
    ends = clock.ends[given["steps"] - 1 :: given["steps"]]
    starts = ends if episodes is None else trainer.generated[1:]  # without or with generation
    iterations = [
        generation | {"seconds": end[0] - start[0], "processor": end[1] - start[1]}
        for generation, start, end in zip(trainer.generations[1:], starts, ends[1:], strict=False)
    ]
    if int(os.environ.get("RANK", "0")) == 0:
        for row in iterations:  # the number of one rank; prompts are divided evenly
            row["written"] *= world
            row["read"] *= world
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result.write_text(json.dumps({"iterations": iterations, "peak": peak}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
