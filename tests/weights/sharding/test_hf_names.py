import json

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_fields import SCALING
from megatron_stppo.weights.sharding.hf_names import read_shape

GIVEN = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
}
SCALED = {"rope_type": "llama3", "factor": 32.0, **SCALING}


def shape_of(folder, **changes):
    (folder / "config.json").write_text(json.dumps(GIVEN | changes))
    return read_shape(folder)


def test_llama3_scaling_is_read_from_old_and_new_files(tmp_path):
    for changes in (
        {"rope_theta": 500000.0, "rope_scaling": SCALED},
        {"rope_parameters": SCALED | {"rope_theta": 500000.0}},
    ):
        shape = shape_of(tmp_path, **changes)
        assert (shape.rope_theta, shape.rope_factor) == (500000.0, 32.0)
    assert shape_of(tmp_path, rope_scaling=None).rope_factor is None


def test_a_disabled_sliding_window_is_accepted(tmp_path):
    shape_of(tmp_path, model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    shape_of(tmp_path, model_type="qwen2", sliding_window=4096)  # as transformers, which slides if asked to
    shape_of(tmp_path, sliding_window=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2' is not supported; choose one of \['gpt_oss', 'llama', "),
        (
            {"hidden_act": "gelu"},
            "hidden_act='gelu' is not supported; use a checkpoint with hidden_act='silu'",
        ),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported; "),
        ({"rope_scaling": SCALED | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0 .* computes with 1.0"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "high_freq_factor=None .* computes with 4.0",
        ),
    ],
)
def test_settings_that_the_layers_do_not_support_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(tmp_path, **changes)
