"""What `import megatron_stppo` gives, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_stppo

NAMES = ["Environment", "StepResult", "Task", "evaluate", "load_config", "ops", "read_run", "train"]
HEAVY = ("torch", "vllm", "megatron", "transformers", "pandas", "numpy")
DOCUMENT = Path(__file__).parents[3] / "docs" / "python.md"


def imported(statement: str) -> list[str]:
    """Return which of HEAVY a new process has imported after a statement."""
    program = f"import json, sys; {statement}; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_package_has_these_names_and_no_others() -> None:
    assert sorted(megatron_stppo.__all__) == NAMES
    assert sorted(dir(megatron_stppo)) == sorted([*NAMES, "__version__"])
    assert all(getattr(megatron_stppo, name) is not None for name in NAMES)
    with pytest.raises(AttributeError, match=r"^module 'megatron_stppo' has no attribute 'trian'$"):
        megatron_stppo.trian  # noqa: B018


def test_the_import_is_quick_because_nothing_large_is_imported() -> None:
    assert imported("import megatron_stppo") == []
    assert imported("from megatron_stppo import Environment, StepResult, Task, load_config, train") == []


def test_every_name_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"`{name}" in text for name in NAMES)


@pytest.mark.long
def test_a_users_types_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "import megatron_stppo as m\n"
        "reveal_type(m.train('config.yaml'))\n"
        "reveal_type(m.evaluate('config.yaml')['evaluate/exact_match'])\n"
        "reveal_type(m.read_run('runs/first').config.run.iterations)\n"
        "reveal_type(m.StepResult('', 0.0, False, True).tool_calls)\n"
        "m.train(5)\n"
    )
    line = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
    found = os.environ | {"MYPYPATH": str(DOCUMENT.parents[1])}
    said = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=found).stdout
    for number, kind in ((2, "pathlib.Path"), (3, "float"), (4, "int"), (5, "int")):
        assert f'user.py:{number}: note: Revealed type is "' in said and kind in said.splitlines()[number - 2]
    assert 'user.py:6: error: Argument 1 to "train" has incompatible type "int"' in said
