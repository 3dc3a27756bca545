"""Claims about the endpoint, which need vLLM (world.py): each function test_* of claims_*.py is a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.agents.endpoint.world import SKIPPED, observe
from tests.ranks import run_ranks
from tests.rollout.vllm.tiny import build_model

CLAIMS = [
    f"{path.stem}:{node.name}"
    for path in sorted(Path(__file__).parent.glob("claims_*.py"))
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tiny")
    build_model(folder)
    seen: dict[str, str] = run_ranks(observe, 1, folder, CLAIMS, timeout=300)[0]
    return seen


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim(found: dict[str, str], claim: str) -> None:
    if found[claim].startswith(SKIPPED):
        pytest.skip(found[claim].removeprefix(SKIPPED))
    assert not found[claim], found[claim]
