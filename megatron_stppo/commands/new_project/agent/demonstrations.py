"""Writes demonstrations.jsonl: conversations from which make_model.py teaches how calls are written.

Half of them also solve their task; the boxes of the others are random.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent import BOXES, TOOLS, Room

ROWS = 2_000


def written(name: str, arguments: str) -> str:
    """Return what the model writes to call a tool, in the form of the parser `hermes`."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def conversations(tasks: list[Any], generator: random.Random) -> Iterator[dict[str, Any]]:
    for _ in range(ROWS):
        task = generator.choice(tasks)
        ball, target = task["extra_info"]["ball"], task["reward_model"]["ground_truth"]["target"][0]
        boxes = (ball, target) if generator.random() < 0.5 else generator.choices(BOXES, k=2)
        room, messages = Room(ball), list(task["prompt"])
        for name, box in zip(("take", "put"), boxes, strict=True):
            arguments = json.dumps({"box": box})
            messages.append({"role": "assistant", "content": written(name, arguments)})
            messages.append({"role": "tool", "content": room.use(name, arguments)})
        messages.append({"role": "assistant", "content": "done"})
        yield {"messages": messages, "tools": TOOLS}


if __name__ == "__main__":
    tasks = [json.loads(line) for line in Path("train.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = conversations(tasks, random.Random(0))
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    Path("demonstrations.jsonl").write_text(text, encoding="utf-8")
