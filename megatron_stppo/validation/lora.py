"""Check `model.lora` against the model. Uses neither torch nor a process group."""

from __future__ import annotations

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.sharding.low_rank import adapted

# Commands that have no meaning with adapters.
REFUSED = {"cold-start": "the cold start trains all weights"}


def check(config: Config, command: str) -> None:
    """Raise ConfigError unless the model's layers can have these adapters, in this command."""
    lora, model = config.model.lora, config.model
    if not lora.rank:
        return
    field = f"model.lora.rank={lora.rank}"
    if command in REFUSED:
        raise ConfigError(f"{field}: {REFUSED[command]}; {command} needs model.lora.rank=0")
    if model.critic_path is not None:
        raise ConfigError(
            f"model.critic_path={model.critic_path}: with {field} the critic shares the actor's weights; "
            "leave it out, or set model.lora.rank=0"
        )
    if model.layers == "transformer_engine":
        raise ConfigError(
            f"model.layers=transformer_engine: its layers do not return the input of an adapter ({field}); "
            "set model.layers=local"
        )
    check_targets(read_shape(model.path), lora.rank, lora.names, lora.targets)


def check_used(config: Config, command: str) -> None:
    """Raise ConfigError if the run of a command that reads adapters has none."""
    if not config.model.lora.rank:
        raise ConfigError(
            f"model.lora.rank=0: {command} writes adapters, and this run trains all weights; set the section "
            "model.lora of the run, or use convert to-hf"
        )


def check_targets(shape: ModelShape, rank: int, names: tuple[str, ...], given: tuple[str, ...]) -> None:
    """Raise ConfigError unless every target of `given` has layers of at least this rank.

    names: the targets without all-linear.
    """
    in_experts = [name for name in given if name in ("gate_proj", "up_proj", "down_proj")]
    if shape.experts and in_experts:
        raise ConfigError(
            f"model.lora.targets={list(given)}: {in_experts[0]} belongs to the experts, and an "
            "adapter would be needed for each of them; choose from q_proj, k_proj, v_proj and o_proj"
        )
    layers = adapted(shape, names)
    if not layers:
        raise ConfigError(
            f"model.lora.targets={list(given)}: matches no layer; give at least one, or all-linear"
        )
    smallest = min(layers, key=lambda key: min(layers[key]))
    largest = min(layers[smallest])
    if rank > largest:
        raise ConfigError(
            f"model.lora.rank={rank}: is larger than the smallest dimension of {smallest}, {largest}; "
            f"choose 1 to {largest}"
        )
