"""One process of benchmark_trees: time scoring and update, or measure their memory.

python -m tools.trees.worker SPECIFICATION.json RESULT.json
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_stppo.cluster.launch import process
from tools.gpu_checks.model import configuration, learner_of, write_model
from tools.measuring import timed
from tools.trees import rollouts

# Random Qwen3 models. slice: four layers of the sizes of Qwen2.5-7B, with the smaller vocabulary of SmolLM2.
SIZES = {
    "tiny": {"hidden": 64, "ffn": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 4096},
    "slice": {"hidden": 3584, "ffn": 18_944, "layers": 4, "heads": 28, "kv_heads": 4, "head_dim": 128}
    | {"vocab": 49_152},
}
GPU = torch.cuda.is_available()
ARMS = {"off": False, "on": True}  # update.share_prefixes
# nats: the largest difference of a token in float32, and the mean in bfloat16
APART, APART_BFLOAT16 = 1e-4, 0.05


class Bench:
    """A learner on one rank, and a batch that it scores and trains on in one optimizer step per minibatch.

    The KL and the entropy terms are off, as in examples/smollm2/search.yaml. So a step of a preset with a
    critic is two passes in scoring (old log-probs, values) and two with backward in the update.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        process.prepare(engine=False)
        from megatron_stppo.data.packing import groups_of, to_batch
        from megatron_stppo.weights.sharding.hf_names import read_shape

        algorithm = {"preset": given["preset"], "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
        update = {"minibatches": given["steps"], "old_logprob": given["old_logprob"]}
        model, optimizer = Path(given["model"]), {"lr": 1e-6, "warmup_fraction": 0.0}
        if given["size"] and not model.exists():
            write_model(model, **SIZES[given["size"]])
        update |= {"share_prefixes": "on", "actor": optimizer, "critic": optimizer}
        self.config = configuration(model, update=update, algorithm=algorithm)
        shape = read_shape(model)
        played = played_of(given)
        if shape.vocab <= (most := max(max(one.token_ids) for one in played)):
            played = rollouts.renumbered(played)
        if shape.vocab <= max(max(one.token_ids) for one in played):
            raise SystemExit(f"--model={model}: has {shape.vocab} tokens; choose one of more than {most}")
        self.learner = learner_of(self.config)
        self.batch, self._groups = to_batch(played), groups_of([one.summary for one in played])

    def packing(self, arm: str, budget: int) -> None:
        """Choose update.share_prefixes and tokens_per_microbatch of what follows."""
        packer = self.learner.packer
        spec = replace(packer.spec, share_prefixes=ARMS[arm], budget=budget)
        self.learner.packer = replace(packer, spec=spec)

    def step(self) -> tuple[dict[str, float], Any, Any]:
        """Score and update; return seconds, the metrics of the update with `first`, and the scored batch.

        The seconds of the processor are those of all threads, also of the advantages; a machine that is not
        idle changes them least.
        `first` is whether the log-probs of the last step are those of the old policy, bit for bit: with one
        step every ratio is then exactly 1.
        """
        from megatron_stppo.training.advantage import estimate
        from megatron_stppo.training.stages import divided, score, update

        seconds, begun = dict[str, float](), time.process_time()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        with timed(seconds, "score"):
            batch = score(self.learner, divided(self.learner, self.batch, 0))
        batch = estimate(batch, self.config.algorithm, self._groups)
        with timed(seconds, "update"):
            row, last, batch = update(self.learner, batch, 0)
        seconds["processor"] = time.process_time() - begun
        if GPU:
            seconds["peak"] = float(torch.cuda.max_memory_allocated())
        if any(row[name] for name in row if name.endswith("/skipped")):
            raise AssertionError("a step was skipped: its loss or gradient is not finite")
        assert last is not None and batch.old_logprob_T is not None
        same = torch.equal(last.logprob_T, batch.old_logprob_T)
        return seconds, row | {"first": same}, batch

    def checked(self, budget: int) -> dict[str, Any]:
        """Compare log-probs with and without sharing, and check that the first ratios are exactly 1.

        Raises AssertionError if they are not, or if the log-probs differ.
        """
        from megatron_stppo.model.pipeline import logprobs

        learner, found = self.learner, {}
        for arm in ARMS:
            self.packing(arm, budget)
            model = learner.policy
            given = (self.batch, learner.packer, [learner.packer.whole(self.batch)])
            found[arm] = logprobs(model, learner.head(model), *given)
        apart_T = (found["on"] - found["off"]).abs()
        most, mean = float(apart_T.max()), float(apart_T.mean())
        exact = process.dtype(self.config) == torch.float32
        if not (most <= APART if exact else mean <= APART_BFLOAT16):  # NaN fails too
            raise AssertionError(f"log-probs with shared prefixes differ by {most} nats, {mean} on average")
        _, row, _ = self.step()
        several = self.config.update.minibatches > 1
        if row["actor/first_kl_to_old"] != 0 or not (row["first"] or several):
            raise AssertionError(
                f"first ratios are not 1: KL to the old policy {row['actor/first_kl_to_old']}"
            )
        return {"largest difference": most, "mean difference": mean, "first ratios are 1": True}


def played_of(given: dict[str, Any]) -> list[Any]:
    """Return the trajectories of a case, or those of a run's iteration."""
    if not given.get("run"):
        return rollouts.trajectories(given["case"], given["tasks"])
    from megatron_stppo.observe.trajectory_log import read

    return [history for one in read(Path(given["run"]), given["iteration"]) for history in one.histories()]


def times(given: dict[str, Any]) -> dict[str, Any]:
    """Return {"check": .., arm: [{score, update}, one for each round]}; arms are called in turn."""
    bench = Bench(given)
    found: dict[str, Any] = {"check": bench.checked(given["budget"]), **{arm: [] for arm in ARMS}}
    for _ in range(given["rounds"]):
        for arm in ARMS:
            bench.packing(arm, given["budget"])
            found[arm].append(bench.step()[0])
    return found


def memory(given: dict[str, Any]) -> dict[str, Any]:
    """Return the peak memory of scoring and update on a CPU in bytes, with models and optimizers' states.

    It is the process's ru_maxrss, but without the peak while the models are built.
    """
    bench = Bench(given)
    bench.packing(given["arm"], given["budget"])
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM becomes the present size
    bench.step()
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert peak is not None
    return {"peak": int(peak[1]) * 1024}


def main(specification: Path, result: Path) -> None:
    given = json.loads(specification.read_text(encoding="utf-8"))
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    work = {"times": times, "memory": memory}[given["work"]]
    result.write_text(json.dumps(work(given)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
