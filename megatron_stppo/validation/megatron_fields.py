"""Check the fields of `megatron:`, which go to megatron's TransformerConfig. Does not import torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.messages import did_you_mean

# Fields of megatron that would change what is trained.
REFUSED = dict.fromkeys(
    ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps", "moe_expert_capacity_factor"),
    "importance ratios need the same network twice",
) | dict.fromkeys(
    ("moe_aux_loss_coeff", "moe_z_loss_coeff"),
    "megatron multiplies it by the tokens of a microbatch, and no gradient is divided by them here",
)
# Fields of megatron that follow from other fields of the configuration. Another value would train a different
# network or scale its gradient, not always with an error.
DECIDED = {
    "tensor_model_parallel_size": "parallel.tensor",
    "expert_tensor_parallel_size": "parallel.tensor",
    "sequence_parallel": "parallel.sequence",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "variable_seq_lengths": "parallel.virtual",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "model.dtype"),
    "calculate_per_token_loss": "the losses, which have their own denominators",
}


def check(config: Config) -> None:
    """Raise ConfigError for a field that does not exist, follows from another field, or changes what is
    trained."""
    for name, reason in REFUSED.items():
        if config.megatron.get(name):
            raise ConfigError(
                f"megatron.{name}={config.megatron[name]}: {reason}; leave it out, or set it to 0"
            )
    if config.megatron.get("moe_router_fusion") and config.algorithm.routing_replay != "off":
        raise ConfigError(
            f"megatron.moe_router_fusion=True: the fused router cannot replay experts "
            f"(algorithm.routing_replay={config.algorithm.routing_replay}); leave it out, or set "
            "algorithm.routing_replay=off"
        )
    for name, value in config.megatron.items():
        if name in DECIDED:
            raise ConfigError(f"megatron.{name}={value}: follows from {DECIDED[name]}; leave it out")
        known = megatron_field_names()
        if name not in known:
            remedy = did_you_mean(name, known, "megatron.{}") or "see megatron's TransformerConfig"
            raise ConfigError(f"megatron.{name}={value!r}: no such field; {remedy}")


@functools.cache
def megatron_field_names() -> tuple[str, ...]:
    """Return the installed TransformerConfig's fields, from its source: importing megatron takes seconds."""
    package = importlib.util.find_spec("megatron.core")
    if package is None or package.origin is None:
        raise ConfigError("megatron-core is not installed; install what tools/lock-cpu.txt lists")
    root = Path(package.origin).parent
    names: list[str] = []
    for file, owner in (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ):
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                names += [
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                ]
    return tuple(names)
