"""An agent that repairs a file of a repository. The reward is the share of the tests that pass.

megatron-stppo train CONFIG data.train=examples/agents/repair/tasks.jsonl environment.kind=agent \
    'environment.command=[.venv/bin/python, examples/agents/repair/agent.py]'

This program talks to the policy and runs outside the sandbox. Only what the policy wrote runs inside.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from openai import OpenAI
from sandbox import HERE, failures

TURNS = 3
SHOWN = 2  # tests whose results the policy sees; the others only count
CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def repair(task: Any, folder: Path, is_safe: bool) -> list[str]:
    """Let the policy write the file, up to TURNS times, and return the failures of all tests."""
    module = task["extra"]["module"]
    file, tests = (
        folder / f"{module}.py",
        json.loads((HERE / "tests.json").read_text(encoding="utf-8"))[module],
    )
    messages: list[Any] = [*task["prompt"]]
    messages[-1] = {
        "role": "user",
        "content": f"{messages[-1]['content']}\n```\n{file.read_text(encoding='utf-8')}```",
    }
    client = OpenAI()
    for _turn in range(TURNS):
        reply = client.chat.completions.create(model=os.environ["MEGATRON_STPPO_MODEL"], messages=messages)
        said = reply.choices[0].message.content or ""
        if found := CODE.search(said):
            file.write_text(found[1], encoding="utf-8", errors="replace")
        failed = [text for text in failures(folder, module, tests[:SHOWN], is_safe) if text]
        if not failed:
            break
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "\n".join(failed)}]
    return failures(folder, module, tests, is_safe)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:  # in TMPDIR, the folder of the episode
        folder = Path(shutil.copytree(HERE / "repository", Path(scratch) / "repository"))
        found = repair(json.load(sys.stdin), folder, is_safe="--no-sandbox" not in sys.argv)
    passed = found.count("")
    print(json.dumps({"reward": passed / len(found), "detail": f"{passed} of {len(found)} tests pass"}))


if __name__ == "__main__":
    main()
