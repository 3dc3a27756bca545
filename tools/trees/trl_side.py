"""Train on given episodes with TRL's GRPO and report the seconds without generation, of every iteration.

    python tools/trees/trl_side.py SPECIFICATION.json RESULT.json

Runs in the environment of tools/benchmark_peers.py, with the settings of tools/peers/trl_side.py. In place of
generation, TRL gets the tokens of the episodes, of which those of a mask are action tokens. The rest of an
iteration is measured: log-probs of the old policy if there are several steps, loss, backward and steps.
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
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Clock(TrainerCallback):
    """Record the time at which each optimizer step ends, and the processor's."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(now())


class Given(GRPOTrainer):
    """GRPOTrainer whose generations are given episodes: [prompt, completion, mask of its action tokens]."""

    episodes: list[tuple[list[int], list[int], list[int]]]
    generated: list[tuple[float, float]]  # the times at which each generation ends

    def _generate(self, prompts):
        assert len(prompts) == len(self.episodes), (len(prompts), len(self.episodes))
        prompt_ids, completion_ids, mask = (
            [list(ids) for ids in x] for x in zip(*self.episodes, strict=True)
        )
        self.generated.append(now())
        return prompt_ids, completion_ids, mask, [""] * len(prompts), None, {}, None, []


def main(specification: Path, result: Path) -> None:
    given = json.loads(specification.read_text(encoding="utf-8"))
    torch.set_num_threads(given["threads"])
    share = len(given["episodes"]) // given["steps"]  # trajectories per optimizer step
    rows = given["amount"]
    config = GRPOConfig(
        output_dir=str(result.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=share // rows,
        steps_per_generation=share // rows * given["steps"],
        num_generations=given["samples"],
        max_steps=given["iterations"] * given["steps"],
        max_completion_length=1000,
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
    groups = len(given["episodes"]) // given["samples"]
    clock = Clock()
    trainer = Given(
        model=given["model"],
        args=config,
        reward_funcs=lambda completions, **_: given["rewards"],
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(groups)]),
        processing_class=AutoTokenizer.from_pretrained(given["model"], trust_remote_code=False),
        callbacks=[clock],
    )
    trainer.episodes, trainer.generated = given["episodes"], []
    trainer.train()
    ends = clock.ends[given["steps"] - 1 :: given["steps"]]
    names = ("seconds", "processor")
    iterations = [
        {name: end - start for name, start, end in zip(names, *both, strict=True)}
        for both in zip(trainer.generated, ends, strict=True)
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.write_text(json.dumps({"iterations": iterations, "peak": peak}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
