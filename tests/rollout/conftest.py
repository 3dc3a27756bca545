from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.once import once
from tests.ranks import run_ranks
from tests.rollout.vllm import alone, test_async_steps
from tests.rollout.vllm.tiny import build_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    build_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def seen_alone(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen(tmp_path_factory, "seen_alone", alone.observe, tiny_folder)


@pytest.fixture(scope="session")
def seen_asynchronous(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen(tmp_path_factory, "seen_asynchronous", test_async_steps.observe, tiny_folder)


def seen(factory: pytest.TempPathFactory, name: str, observe: Any, model: Path) -> dict[str, Any]:
    """Return observe(model), called on a rank for all files of tests together."""

    def write(folder: Path) -> None:
        (folder / "seen").write_bytes(pickle.dumps(run_ranks(observe, 1, model, timeout=240)[0]))

    found = pickle.loads((once(factory, name, write) / "seen").read_bytes())
    assert isinstance(found, dict)
    return found
