from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.ranks import run_ranks
from tests.rollout import alone, test_async_steps
from tests.rollout.tiny import build_model


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
def seen_alone(tiny_folder: Path) -> dict[str, Any]:
    return run_ranks(alone.observe, 1, tiny_folder, engine=True)[0]


@pytest.fixture(scope="session")
def seen_asynchronous(tiny_folder: Path) -> dict[str, Any]:
    return run_ranks(test_async_steps.observe, 1, tiny_folder, timeout=240, engine=True)[0]  # type: ignore[no-any-return]
