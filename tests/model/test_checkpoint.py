from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_stppo.config import ConfigError
from megatron_stppo.parallel import cpu_platform
from tests.ranks import run_ranks


def refuse() -> list[str]:
    if cpu_platform.needed():
        cpu_platform.install()
    from megatron_stppo.model.checkpoint import _check_experts, _check_layers, layers_of

    local, fused = torch.nn.Module(), torch.nn.Module()
    fused.linear_qkv = torch.nn.Module()
    fused.linear_qkv.layer_norm_weight = torch.nn.Parameter(torch.ones(2))
    assert (layers_of([local]), layers_of([fused])) == ("local", "transformer_engine")
    _check_layers(Path("step_3"), {"layers": "local"}, [local])
    shared = SimpleNamespace(config=SimpleNamespace(expert_model_parallel_size=4))
    _check_experts(Path("step_3"), {"expert": 2}, [shared])
    messages = []
    for check, state, chunk in (
        (_check_layers, {"layers": "local"}, fused),
        (_check_experts, {"expert": 1}, shared),
    ):
        with pytest.raises(ConfigError) as error:
            check(Path("step_3"), state, [chunk])
        messages.append(str(error.value))
    return messages


def test_a_checkpoint_of_other_layers_or_of_experts_on_every_rank_is_refused_by_name():
    (messages,) = run_ranks(refuse, 1)
    for message, start in zip(
        messages,
        (
            "was written with model.layers=local, this run has transformer_engine",
            "was written with parallel.expert=1, whose optimizer state does not fit parallel.expert=4",
        ),
        strict=True,
    ):
        assert message.startswith(f"step_3: {start}")
