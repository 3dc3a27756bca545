"""Measure the cost of Routing Replay R3, and how log-probs of engine and trainer differ with and without it.

    python tools/benchmark_routing_replay.py [--dtype bfloat16] [--experts 32] [--repeats 3]

A random Qwen3-MoE of 4 layers with 4 experts per token plays 32 episodes of three turns on one rank. The
weights of its routers are small, so that the scores of experts are nearly equal. The trainer scores the
episodes with the experts that its own routers choose, and with those that the engine chose. Times are the
processor time of one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHOSEN, EPISODES = 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # where environment.kind is looked for
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.dtype, given.experts, given.repeats)


def measure(folder: Path, dtype: str, experts: int, repeats: int) -> None:
    from megatron_stppo.launch import process

    process.prepare()
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.rollout.collect import RolloutSettings
    from megatron_stppo.rollout.episode import Limits
    from megatron_stppo.stages import distribute, score
    from megatron_stppo.worker import assemble
    from tests.rollout.tiny import CONTEXT, task

    torch.set_num_threads(1)
    write(folder, experts)
    settings: dict[str, Any] = {
        "model": {"path": folder, "dtype": dtype},
        "environment": {"kind": "tests.rollout.replaying:factory"},
        "rollout": {"max_context": CONTEXT, "kv_cache_gib": 0.1, "samples_per_task": 4},
        "update": {"minibatches": 1, "old_logprob": "score"},
        "algorithm": {"routing_replay": "rollout", "preset": "grpo", "kl_coefficient": 0},
    }
    config = Config.model_validate(settings)
    recording = Config.model_validate(
        settings | {"algorithm": settings["algorithm"] | {"routing_replay": "old_policy"}}
    )
    worker = assemble(config)
    worker.publish(1)
    limits = Limits(max_prompt_tokens=60, max_turn_tokens=40, max_observation_tokens=30, max_context=CONTEXT)
    sampling = RolloutSettings(limits, deadline=60.0, overlap_tools=False)
    engine: Any = worker.engine
    routes, routers = engine._routes, engine._routes.routers
    functions = [router.capture_fn for router in routers]
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats + 1):
        for records in (False, True):
            engine._routes = routes if records else None
            for router, function in zip(routers, functions, strict=True):
                router.set_capture_fn(function if records else None)
            routes.clear()
            engine._core.reset_prefix_cache()
            began = time.process_time()
            played = worker.play([task(n) for n in range(EPISODES // 4)], 4, sampling, seed=1)
            times[records].append(time.process_time() - began)
    worker.load_for("score")
    learner = worker.learner
    batch = distribute(learner, played, 0)
    assert batch.routes_P is not None
    learner.config = recording
    own = score(learner, replace(batch, routes_P=None), 0)  # records what the routers choose
    learner.config = config
    replayed = score(learner, batch, 0)
    assert own.routes_P is not None
    known = batch.routes_P != torch.iinfo(batch.routes_P.dtype).max
    differ = (own.routes_P.sort(-1)[0] != batch.routes_P.sort(-1)[0])[known.all(-1)].any(-1)
    tokens, each = batch.tokens, len(batch.routes_P[0].flatten())
    print(f"{dtype}, {experts} experts, {tokens} tokens, {each} bytes per token")
    print(f"tokens of a layer with another set of experts: {100 * float(differ.float().mean()):.2f} %")
    print("| experts of the trainer | mean difference, nats | largest | median |\n|---|---|---|---|")
    for name, scored in (("its routers'", own), ("the engine's (R3)", replayed)):
        assert scored.old_logprob_T is not None
        apart = (scored.old_logprob_T - scored.rollout_logprob_T).abs()
        print(
            f"| {name} | {float(apart.mean()):.2e} | {float(apart.max()):.2e} | {float(apart.median()):.2e} |"
        )
    median = {records: statistics.median(each[1:]) for records, each in times.items()}
    print(f"rollout: {median[False]:.2f} s, with recording {median[True]:.2f} s")


def write(folder: Path, experts: int) -> None:
    import torch
    import transformers

    from tests.rollout.tiny import CONTEXT, VOCABULARY, build_tokenizer

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=build_tokenizer().eos_token_id,
        initializer_range=0.06,
    )
    model = transformers.Qwen3MoeForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(0.1)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
