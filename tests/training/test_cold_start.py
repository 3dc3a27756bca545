from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stppo.config.peft_folder import read_folder
from megatron_stppo.data.demonstrations import Demonstration
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.training.cold_start import as_batch, by_tokens
from tests.ranks import run_ranks
from tests.training import cold_step
from tests.training.update import layouts

SCRIPT = Demonstration((7, 8, 3, 9, 4), (False, False, True, False, True))
SCRIPTS = [
    ((7, 8, 3, 9, 4), (False, False, True, False, True)),
    ((2, 5, 11, 6, 1, 13), (False, False, False, True, True, False)),
    ((9, 1, 4), (False, True, True)),
    ((3, 3, 12, 10), (False, False, True, True)),
]


def test_a_step_takes_no_more_tokens_than_allowed_but_one_row_per_rank() -> None:
    def rows(sizes: list[int], budget: int, ranks: int) -> list[int]:
        scripts = [Demonstration((5,) * size, (True,) * size) for size in sizes]
        return [len(step) for step in by_tokens(scripts, len, budget, ranks)]

    assert rows([50] * 5, 1, 1) == [1, 1, 1, 1, 1]
    assert rows([50] * 5, 100, 1) == [2, 2, 1]
    assert rows([50] * 5, 149, 2) == [2, 2], "the last row is too few for two ranks"
    assert rows([20, 30, 60, 10], 50, 1) == [2, 1, 1]


def test_every_token_but_the_first_is_trained_on() -> None:
    batch = as_batch([SCRIPT, SCRIPT])
    assert batch.tokens_P.tolist() == [7, 8, 3, 9, 4] * 2
    assert batch.action_index_T.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]


def test_the_loss_on_two_ranks_is_the_weighted_mean_over_all_tokens(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "hf", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)

    def reference(context_weight: float) -> float:
        loss = weight = 0.0
        for ids, written in SCRIPTS:
            logprob = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
            for t in range(1, len(ids)):
                own = 1.0 if written[t] else context_weight
                loss, weight = loss - own * float(logprob[t - 1, ids[t]]), weight + own
        return loss / weight

    weights = [1.0, 0.25, 0.0]
    for found in run_ranks(cold_step.losses, 2, str(tmp_path / "hf"), SCRIPTS, weights):
        assert [of_all for of_all, _ in found] == pytest.approx(list(map(reference, weights)), rel=1e-5)
        assert [of_turns for _, of_turns in found] == pytest.approx([reference(0.0)] * 3, rel=1e-5)


def test_a_run_begins_with_the_adapters_of_a_cold_start_bit_for_bit(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / "hf", num_hidden_layers=2)
    layouts.write_model(tmp_path / "other", num_hidden_layers=2, initializer_range=0.2)
    base = (tmp_path / "hf" / "model.safetensors").read_bytes()
    folders = [str(tmp_path / name) for name in ("hf", "other", "out")]
    for losses, imported in run_ranks(cold_step.adapted, 2, *folders[:2], SCRIPTS, folders[2]):
        assert imported == losses[3] < losses[2] < losses[1] < losses[0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = read_folder(tmp_path / "out")
    assert written.targets == ("q_proj", "v_proj", "down_proj")
    assert digests(tmp_path / "hf").items() < written.recorded.items()
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == base
