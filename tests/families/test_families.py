"""A family is one folder or file of families/, and the rest of the package names none."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import megatron_stppo.families
from tests.ranks import leave_group, run_ranks
from tests.rollout.vllm.tiny import CONTEXT, VOCABULARY, build_tokenizer
from tests.training.loop import small_run
from tests.training.loop.small_run import ROOT

PACKAGE = Path(megatron_stppo.__file__).parent
NAMES = re.compile("gptoss|qwen|llama|mixtral|deltanet|sinks|yarn")
OTHER = {  # names that are not those of a family
    "config/model.py": {"deltanet"},  # the field by which users choose kernels of a technique
    "weights/sharding/hf_fields.py": {"llama"},  # transformers' name of a kind of rotary embeddings
    "commands/new_project/template/make_model.py": {"qwen"},  # copied into a user's project
}
FIELDS: dict[str, Any] = {
    "model_type": "twin",
    "architectures": ["TwinForCausalLM"],
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
}


def write(folder: Path) -> None:
    """Write a random model of two layers."""
    from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape

    folder.mkdir()
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(FIELDS))
    shape, generator = read_shape(folder), torch.Generator().manual_seed(0)
    tensors = {
        shape.stored(name): (len(size) == 1) + 0.1 * torch.randn(size, generator=generator)
        for name, size in hf_shapes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def train(folder: Path, config: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Write a model, train it for an iteration, and return the iteration's metrics."""
    settings = _settings(folder, config, overrides, "train")
    from megatron_stppo.commands.train import start_training

    start_training(settings)
    (row,) = (settings.run.folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(row)


def export(folder: Path, config: Path, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Export the trained model, and return whether each of its tensors differs from those of the folder."""
    settings = _settings(folder, config, overrides, "convert")
    from megatron_stppo.checkpoint.convert import to_hf

    to_hf(settings, "latest", folder.with_name("out"))
    before, after = (load_file(at / "model.safetensors") for at in (folder, folder.with_name("out")))
    return {name: not torch.equal(before[name], after[name]) for name in before | after}


def _settings(folder: Path, config: Path, overrides: tuple[str, ...], command: str) -> Any:
    leave_group()
    megatron_stppo.families.__path__.append(str(Path(__file__).parent / "made_up"))
    from megatron_stppo.commands.open_run import open_config

    if not folder.exists():
        write(folder)
    return open_config(config, [f"model.path={folder}", *overrides], command, modules=ROOT)


def test_a_folder_adds_a_family(tmp_path: Path) -> None:
    given = ("parallel.tensor=1", "run.iterations=1", "run.checkpoint_every=1")
    config = small_run.write(tmp_path)
    (row,) = run_ranks(train, 1, tmp_path / "twin", config, given)
    assert row["mismatch/mean_abs"] < 1e-5 and row["actor/first_kl_to_old"] == 0
    (changed,) = run_ranks(export, 1, tmp_path / "twin", config, given)
    assert {"model.layers.1.attention_norm.weight", "model.layers.0.mixing.q_proj.weight"} <= changed.keys()
    assert all(changed.values())


def test_a_family_is_named_in_its_folder_only() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        words = " ".join([name, *written(ast.parse(path.read_text(encoding="utf-8")))])
        if not name.startswith("families/") and (of := {*NAMES.findall(words)} - OTHER.get(name, set())):
            found[name] = of
    assert found == {}


def test_a_name_is_found_in_identifiers_and_words_but_not_in_sentences() -> None:
    tree = ast.parse('class GptOss:\n    """As Qwen3."""\n    model_type = f"llama-{1}"\nx.delta_net = 1')
    assert {*NAMES.findall(" ".join(written(tree)))} == {"gptoss", "deltanet", "llama"}


def test_families_are_described_without_torch() -> None:
    program = (
        "import sys\nfrom megatron_stppo.weights.sharding.hf_names import families\n"
        "assert len(families()) > 8 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def written(tree: ast.AST) -> Iterator[str]:
    """Yield the letters of a module's identifiers, and of its texts that are no sentences for people."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and " " not in value:
                yield re.sub("[^a-z]", "", value.lower())
