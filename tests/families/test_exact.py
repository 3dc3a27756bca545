"""The trainer's models are those of transformers, in float64 and packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import exact
from tests.ranks import run_ranks
from tests.training.update.layouts import write_model


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss"])
def test_packed_sequences_have_the_logprobs_and_gradients_of_transformers(
    tmp_path: Path, family: str
) -> None:
    write_model(tmp_path, family)
    ((gradients, logprobs),) = run_ranks(exact.both, 1, tmp_path)
    assert max(logprobs) < 1e-12
    assert max(gradients.values()) < 1e-11, max(gradients, key=gradients.__getitem__)
