"""Write the tasks of this example, sums made by reasoning-gym: data/sums/train.jsonl and evaluate.jsonl.

python examples/qwen2.5-0.5b/make_data.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "reasoning_gym"))
from gym_tasks import task_rows

from megatron_stppo.config import ConfigError

SETTINGS = {"min_terms": 4, "max_terms": 8, "min_digits": 2, "max_digits": 3}
# {split: (tasks, seed)}. The package makes task i from seed + i, so the seeds are far apart.
SPLITS = {"train": (4096, 0), "evaluate": (256, 1_000_000)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, (size, seed) in SPLITS.items():
        rows = task_rows("chain_sum", split, size, seed, **SETTINGS)
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / split}.jsonl: {size} tasks")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/sums"))
    except ConfigError as error:  # reasoning-gym is not installed
        sys.exit(str(error))
