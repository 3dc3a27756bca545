from pathlib import Path

import pytest
import torch

from megatron_stppo.config import ConfigError
from megatron_stppo.parallel import cpu_platform
from tests.ranks import run_ranks


def refuse_other_layers() -> str:
    if cpu_platform.needed():
        cpu_platform.install()
    from megatron_stppo.model.checkpoint import _check_layers, layers_of

    local, fused = torch.nn.Module(), torch.nn.Module()
    fused.linear_qkv = torch.nn.Module()
    fused.linear_qkv.layer_norm_weight = torch.nn.Parameter(torch.ones(2))
    assert (layers_of([local]), layers_of([fused])) == ("local", "transformer_engine")
    _check_layers(Path("step_3"), {"layers": "local"}, [local])
    with pytest.raises(ConfigError) as error:
        _check_layers(Path("step_3"), {"layers": "local"}, [fused])
    return str(error.value)


def test_a_checkpoint_of_other_layers_is_refused_by_name():
    (message,) = run_ranks(refuse_other_layers, 1)
    assert message.startswith("step_3: was written with model.layers=local, this run has transformer_engine")
