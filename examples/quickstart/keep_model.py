"""Write examples/quickstart/model: the cold-started model of runs/quickstart, rounded to bfloat16.

    make quickstart-model        # runs the quickstart with --cold-start and seed 0, then this file

The cold start rounds differently on other types of CPU, so the bits of the file are those of one machine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

MODEL = Path(__file__).parent / "model"


def keep(source: Path, target: Path) -> None:
    """Copy a Hugging Face folder with its weights in bfloat16."""
    target.mkdir(exist_ok=True)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep(Path("runs/quickstart/cold-start"), MODEL)
