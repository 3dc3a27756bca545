"""Write the tasks of this example, multi-turn tasks of bfcl-eval: data/bfcl/train.jsonl and evaluate.jsonl.

python examples/bfcl/make_data.py [FOLDER]
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bfcl import KIND
from bfcl_tools import SimulatedApis, data_folder, load

from megatron_stppo.config import ConfigError

VARIANTS = ("base", "miss_func", "miss_param", "long_context")
SCENARIOS, BLOCK = 200, 50  # of every variant; a block has one main API: files, vehicle, trading, travel
SYSTEM = (
    "You help the user by calling functions. Their signatures are:\n{tools}\n\n"
    "Write each call as a JSON object between these tags:\n"
    '<tool_call>\n{{"name": <name of the function>, "arguments": <object of arguments>}}\n</tool_call>\n'
    "You then read the results. When the request is done, or cannot be done with these functions, answer "
    "without a call."
)
ADDED = "More functions are available now:\n{tools}\nPlease use them for my last request."


def task_rows(split: str, held_out: int = 10, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data file, in the verl schema. The same arguments give the same rows.

    A scenario is in one split, with all its variants. Scenario 49 of miss_func withholds `tail`, which its
    ground truth calls earlier; here that function is not withheld.

    split: train or evaluate. held_out: scenarios of each block of 50 that are in evaluate.
    Raises ConfigError without the package, or for another split.
    """
    if split not in ("train", "evaluate"):
        raise ConfigError(f"split={split}: choose train or evaluate")
    apis, folder = load(), data_folder()
    rng = random.Random(seed)
    blocks = [range(first, first + BLOCK) for first in range(0, SCENARIOS, BLOCK)]
    chosen = {scenario for block in blocks for scenario in rng.sample(block, held_out)}
    for variant in VARIANTS:
        name = f"BFCL_v4_multi_turn_{variant}.json"
        pairs = zip(_lines(folder / name), _lines(folder / "possible_answer" / name), strict=True)
        for scenario, (given, answer) in enumerate(pairs):
            assert given["id"] == answer["id"] == f"multi_turn_{variant}_{scenario}"
            if (scenario in chosen) == (split == "evaluate"):
                yield _row(apis, given, answer["ground_truth"], split, variant, scenario)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(
    apis: SimulatedApis, given: dict[str, Any], truth: list[list[str]], split: str, variant: str, index: int
) -> dict[str, Any]:
    classes = given["involved_classes"]
    schemas = {name: schema for each in classes for name, schema in apis.functions[each].items()}
    added = {int(turn): names for turn, names in given.get("missed_function", {}).items()}
    hidden, turns = {*given.get("excluded_function", [])}, []
    for number, (messages, calls) in enumerate(zip(given["question"], truth, strict=True)):
        names = added.get(number, [])
        text = "\n".join(message["content"] for message in messages)
        if names:
            text = ADDED.format(tools=_tools([schemas[name] for name in names]))
        turns.append({"user": text, "added": names, "calls": [_parsed(schemas, call) for call in calls]})
        hidden |= set(names) - {call["name"] for turn in turns[:-1] for call in turn["calls"]}
    shown = [schema for name, schema in schemas.items() if name not in hidden]
    return {
        "data_source": f"{KIND}/{variant}",
        "prompt": [
            {"role": "system", "content": SYSTEM.format(tools=_tools(shown))},
            {"role": "user", "content": turns[0]["user"]},
        ],
        "reward_model": {"style": "rule", "ground_truth": given["id"]},
        "extra_info": {
            "split": split,
            "index": VARIANTS.index(variant) * SCENARIOS + index,
            KIND: {
                "classes": classes,
                "state": given["initial_config"],
                "long_context": variant == "long_context",
                "hidden": sorted(hidden),
                "turns": turns,
            },
        },
    }


def _tools(schemas: Sequence[dict[str, Any]]) -> str:
    lines = (json.dumps({"type": "function", "function": schema}) for schema in schemas)
    return "<tools>\n" + "\n".join(lines) + "\n</tools>"


def _parsed(schemas: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a call of the ground truth, which is written in Python, as JSON.

    Example: "sort('a.txt')" gives {"name": "sort", "arguments": {"file_name": "a.txt"}}.
    """
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name), text
    values = dict(zip(schemas[call.func.id]["parameters"]["properties"], call.args, strict=False))
    values |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    return {
        "name": call.func.id,
        "arguments": {name: ast.literal_eval(node) for name, node in values.items()},
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "evaluate"):
        lines = [f"{json.dumps(row)}\n" for row in task_rows(split)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(lines)} tasks")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/bfcl"))
    except ConfigError as error:  # bfcl-eval is not installed
        sys.exit(str(error))
