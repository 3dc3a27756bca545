"""A family is one folder or file of families/, and the rest of the package names none."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import megatron_stppo
from tests.families import adding
from tests.ranks import run_ranks
from tests.training.loop import small_run

ROOT = Path(megatron_stppo.__file__).parent
NAMES = re.compile("gptoss|qwen|llama|mixtral|deltanet|sinks|yarn")
OTHER = {  # names that are not those of a family
    "config/model.py": {"deltanet"},  # the field by which users choose kernels of a technique
    "weights/sharding/hf_fields.py": {"llama"},  # transformers' name of a kind of rotary embeddings
    "weights/gguf/tokenizer.py": {"llama", "qwen"},  # names of vocabularies
    "commands/new_project/template/make_model.py": {"qwen"},  # copied into a user's project
}


def test_a_folder_adds_a_family(tmp_path: Path) -> None:
    given = ("parallel.tensor=1", "run.iterations=1", "run.checkpoint_every=1")
    config = small_run.write(tmp_path)
    (row,) = run_ranks(adding.train, 1, tmp_path / "twin", config, given)
    assert row["mismatch/mean_abs"] < 1e-5 and row["actor/first_kl_to_old"] == 0
    (changed,) = run_ranks(adding.export, 1, tmp_path / "twin", config, given)
    assert {"model.layers.1.attention_norm.weight", "model.layers.0.mixing.q_proj.weight"} <= changed.keys()
    assert all(changed.values())


def test_a_family_is_named_in_its_folder_only() -> None:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
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
