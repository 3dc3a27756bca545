"""Build the files of the calculator example: SmolLM2-135M-Instruct, word problems, demonstrations.

    python examples/smollm2/build_problems.py --output DIR [--seed 0] [--tokens 6000]

Demonstrations teach the form of a call and of an answer only: their operators are random.
DIR/model/  train.jsonl  evaluate.jsonl  demonstrations.jsonl  manifest.json
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))  # before an installed package `build`
from build import command, write_rows
from calculator import INSTRUCTION, compute
from pretrained import link_model
from problems import problems
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stppo.data.demonstrations import encode, validated

VERSION = 4  # raise it if the same arguments now give different files
SIZES = {"train": 2048, "test": 128}


def main(argv: Sequence[str] | None = None) -> None:
    command(build, __doc__.splitlines()[0], VERSION, 6_000, argv)


class Form(NamedTuple):
    """How a turn is written: the instruction of the prompt, and what stands before a call and an answer.

    thoughts(question, numbers, expression, value, generator) returns the two texts.
    """

    instruction: str
    thoughts: Callable[[str, list[str], str, str, random.Random], tuple[str, str]]


SHORT = Form(INSTRUCTION, lambda *given: ("", ""))


def build(folder: Path, seed: int, tokens: int, form: Form = SHORT) -> None:
    tokenizer = AutoTokenizer.from_pretrained(link_model(folder), trust_remote_code=False)
    for split, name in (("train", "train"), ("test", "evaluate")):
        found = islice(problems(split, random.Random(f"{seed}/{split}")), SIZES[split])
        rows = (row(split, index, *one, form) for index, one in enumerate(found))
        write_rows(folder / f"{name}.jsonl", rows)
    rows = demonstrations(random.Random(f"{seed}/demonstrations"), form)
    write_rows(folder / "demonstrations.jsonl", within(tokens, rows, tokenizer))


def within(
    tokens: int, rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """Yield demonstrations with together at most so many tokens."""
    for one in rows:
        tokens -= len(encode([validated(one)], tokenizer)[0])
        if tokens < 0:
            return
        yield one


def row(split: str, index: int, kind: str, question: str, expression: str, form: Form) -> dict[str, Any]:
    return {
        "data_source": kind,
        "prompt": prompt(question, form),
        "reward_model": {"style": "rule", "ground_truth": {"target": [compute(expression)]}},
        "extra_info": {"split": split, "index": index},
    }


def prompt(question: str, form: Form) -> list[dict[str, str]]:
    return [{"role": "system", "content": form.instruction}, {"role": "user", "content": question}]


def demonstrations(generator: random.Random, form: Form = SHORT) -> Iterator[dict[str, Any]]:
    """Yield episodes whose expression has the first numbers of the question, with any operators."""
    for _, question, _ in problems("train", generator):
        numbers = re.findall(r"\d+", question)
        numbers = numbers[: generator.choice((2, len(numbers)))]
        expression = numbers[0] + "".join(generator.choice("+-*") + number for number in numbers[1:])
        value = str(compute(expression))
        first, last = form.thoughts(question, numbers, expression, value, generator)
        yield {
            "prompt": prompt(question, form),
            "segments": [
                {"kind": "turn", "text": f"{first}calc: {expression}\n"},
                {"kind": "observation", "text": f"= {value}\n"},
                {"kind": "turn", "text": f"{last}answer: {value}\n"},
            ],
        }


if __name__ == "__main__":
    main()
