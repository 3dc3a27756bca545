"""The notebook of examples/: it can be read, has no outputs, and its cells run.

The cells are plain Python, so that the test needs no notebook server. They run in the order of the file, in
one process, with the real training and evaluation.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_stppo

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook" / "first_run.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_explains_every_cell_and_has_no_outputs() -> None:
    code = cells("code")
    assert len(cells("markdown")) > len(code) >= 5
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]
    for cell in code:
        tree = ast.parse("".join(cell["source"]), cell["id"])
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        ours = {alias.name for node in imports if node.module == "megatron_stppo" for alias in node.names}
        assert ours <= set(megatron_stppo.__all__)


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    shown = ["print(numbers)", "print(len(episodes))"]
    program = "\n".join(["".join(cell["source"]) for cell in cells("code")] + shown)
    given = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("st_ppo 2/2: reward")]
    assert lines[-1] == "160" and "'evaluate/environment/guesses'" in lines[-2]
    assert not [line for line in lines if "\x1b" in line], "plain lines, no progress bars"


@pytest.mark.long
def test_the_notebook_runs_in_a_notebook_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows the output of the training, which its environment asks to colour."""
    nbclient = pytest.importorskip("nbclient", reason="needs megatron-stppo[notebook]")
    nbformat = pytest.importorskip("nbformat", reason="needs megatron-stppo[notebook]")
    pytest.importorskip("ipykernel", reason="needs megatron-stppo[notebook]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()
    (train,) = (cell for cell in notebook.cells if cell.id == "train")
    text = "".join(output.text for output in train.outputs)
    assert "st_ppo 2/2: reward" in text and "\x1b" not in text
