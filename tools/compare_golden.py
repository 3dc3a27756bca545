"""Record the results of small runs, and compare another version of the code with the record, bit for bit.

    python tools/compare_golden.py record FOLDER       # with the old code
    python tools/compare_golden.py compare FOLDER      # with the new code: exits 1 if a number differs

The cases are:

    - three iterations of the quickstart, with tensor, pipeline and data parallelism over two ranks
    - a run that is resumed after its second iteration
    - a mixture of experts with replayed routing
    - a run with two epochs and the correction, on one rank

The record contains the rows of metrics.jsonl and a digest of every exported tensor. Floats differ between
machines, so record and compare on the same machine. FOLDER/SIDE/ keeps the files of a side. A case that has
been recorded is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file is run as a script

from tools.processes import ROOT, run

CONFIG = ROOT / "examples" / "quickstart" / "config.yaml"
# Metrics that depend on time or on the machine.
MEASURED = re.compile(r"seconds|share/|per_second|memory|gpu/|mfu/|straggler|time")
SHORT = ("run.iterations=3", "run.checkpoint_every=1", "run.keep_checkpoints=3", "run.evaluate_every=3")
SMALL = ("rollout.tasks_per_iteration=16", "evaluate.tasks=16", "evaluate.samples=1")
LAYOUTS = {
    "tensor": ("parallel.tensor=2",),
    "pipeline": ("parallel.tensor=1", "parallel.pipeline=2"),
    "data": ("parallel.tensor=1",),
    "experts": ("parallel.tensor=1", "parallel.expert=2", "algorithm.routing_replay=old_policy"),
}
# Steps on batches that have become stale; the name of the case stays that of older records.
STALE = [
    *("parallel.tensor=1", "algorithm.preset=st_ppo", "update.minibatches=4", "update.epochs=2"),
    *("rollout.tasks_per_iteration=16", "rollout.samples_per_task=4", "evaluate.samples=1", "run.seed=0"),
    *("update.actor.lr=0.0006", "update.critic.lr=0.0018", "run.iterations=2", "run.evaluate_every=2"),
    *("run.checkpoint_every=1", "run.dump=none"),
]


class Side:
    """One version's runs, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Build the quickstart's files, cold-start a model on 60,000 tokens, and write random experts."""
        data = self.folder / "data"
        if not (data / "manifest.json").exists():
            script = CONFIG.with_name("build.py")
            self._run("build", sys.executable, str(script), "--output", str(data), "--seed", "0")
        if not (self.folder / "dense" / "config.json").exists():
            output, source = (f"cold_start.output={self.folder / 'dense'}", f"model.path={data / 'model'}")
            options = ("cold_start.tokens=60000", "parallel.tensor=1", "run.name=cold-start", output, source)
            self._package("cold-start", "cold-start", 2, *self._fields(), *options)
        if not (self.folder / "experts" / "config.json").exists():
            write_experts(self.folder / "dense", self.folder / "experts")

    def results(self) -> dict[str, Any]:
        """Return {case: {"rows": of metrics.jsonl, "weights": {tensor: digest}}} of every case."""
        self.prepare()
        cases = {name: self._case(name, 2, *SHORT, *SMALL, *fields) for name, fields in LAYOUTS.items()}
        ended = shutil.ignore_patterns("exported", "exit.json", "step_3")
        runs = self.folder / "runs"
        if not (runs / "resumed" / "exported").exists():  # the last iteration, from the checkpoint before it
            shutil.rmtree(runs / "resumed", ignore_errors=True)
            shutil.copytree(runs / "data", runs / "resumed", ignore=ended)
        cases["resumed"] = self._case("resumed", 2, *SHORT, *SMALL, *LAYOUTS["data"], "--resume")
        return cases | {"study": self._case("study", 1, *STALE)}

    def _case(self, name: str, ranks: int, *overrides: str) -> dict[str, Any]:
        model = self.folder / ("experts" if name == "experts" else "dense")
        fields = (*self._fields(), f"model.path={model}", f"run.name={name}", *overrides)
        if not (self.folder / "runs" / name / "exported").exists():
            if "--resume" not in overrides:
                shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
            self._package(name, "train", ranks, *fields)
        return self._read(name)

    def _read(self, name: str) -> dict[str, Any]:
        run = self.folder / "runs" / name
        if not (run / "exported").exists():
            command = ("convert", "to-hf", str(run / "config.yaml"), "latest", str(run / "exported"))
            self._run(f"{name}-export", sys.executable, "-m", "megatron_stppo", *command)
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [{k: v for k, v in json.loads(line).items() if not MEASURED.search(k)} for line in lines]
        return {"rows": rows, "weights": digests(run / "exported")}

    def _fields(self) -> tuple[str, ...]:
        data = self.folder / "data"
        files = {name: data / f"{name}.jsonl" for name in ("train", "evaluate", "demonstrations")}
        fields = {f"data.{name}": path for name, path in files.items()}
        fields |= {"environment.retrieval.index": data / "index", "run.root": self.folder / "runs"}
        return tuple(f"{name}={value}" for name, value in fields.items())

    def _package(self, name: str, command: str, ranks: int, *arguments: str) -> None:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        self._run(name, sys.executable, *launcher, "-m", "megatron_stppo", command, str(CONFIG), *arguments)

    def _run(self, name: str, *command: str) -> None:
        print(f"{self.folder.name}: {name}", file=sys.stderr)
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        run(command, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, log=log)


def write_experts(dense: Path, folder: Path) -> None:
    """Write a random mixture of 4 experts with the tokenizer of `dense`."""
    import transformers

    torch.manual_seed(0)
    sizes = transformers.AutoConfig.from_pretrained(dense, trust_remote_code=False).to_dict()
    same = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    shape = transformers.Qwen3MoeConfig(
        **{name: sizes[name] for name in (*same.split(), "max_position_embeddings", "tie_word_embeddings")},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        intermediate_size=64,
    )
    transformers.Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    for file in (*dense.glob("*token*"), *dense.glob("chat_template*")):
        shutil.copy(file, folder)


def digests(folder: Path) -> dict[str, str]:
    """Return {tensor: SHA-256 of its type, shape and bytes} of a Hugging Face folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
                found[name] = hashlib.sha256(head + tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return one line per number or tensor that is not the same on both sides."""
    old, new = flat(before), flat(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name, 'missing')} -> {new.get(name, 'missing')}" for name in names]


def flat(results: dict[str, Any]) -> dict[str, str]:
    """Return the numbers and digests by place, as text: NaN equals NaN, and 0.0 is not -0.0."""
    found = {}
    for case, side in results.items():
        for number, row in enumerate(side["rows"]):
            found |= {f"{case}: row {number}, {key}": repr(value) for key, value in row.items()}
        found |= {f"{case}: weights of {name}": digest for name, digest in side["weights"].items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if a record was written or nothing differs, 1 if something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path, help="folder of the record and of the files of both sides")
    given = parser.parse_args(argv)
    folder = given.folder.resolve()
    record = folder / "record.json"
    if given.what == "compare" and not record.exists():
        parser.error(f"{record} does not exist; call `record {given.folder}` with the code before the change")
    try:
        results = Side(folder / given.what).results()
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    if given.what == "record":
        record.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{len(results)} cases in {record}")
        return 0
    found = differences(json.loads(record.read_text(encoding="utf-8")), json.loads(json.dumps(results)))
    print("\n".join(found) if found else f"{len(results)} cases, every number and every tensor the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
