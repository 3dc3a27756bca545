"""Write the tasks of this example, multi-turn tasks of bfcl-eval: data/bfcl/train.jsonl and evaluate.jsonl.

python examples/bfcl/make_data.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_stppo.config import ConfigError
from megatron_stppo.environments.bfcl import task_rows


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
