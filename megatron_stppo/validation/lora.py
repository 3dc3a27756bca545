"""Check `model.lora` against the model. Uses no process group."""

from __future__ import annotations

from pathlib import Path

from megatron_stppo.cluster.launch.vllm_environment import LORA_RANKS
from megatron_stppo.config import Config, ConfigError, LoraConfig
from megatron_stppo.config.peft_folder import DIGEST, SETTINGS, PeftFolder, read_folder
from megatron_stppo.data.text.tokenizer_files import different
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.low_rank import adapted, adapter_shapes


def check(config: Config) -> None:
    """Raise ConfigError unless the model's layers can have these adapters, and model.lora.path holds such."""
    lora, model = config.model.lora, config.model
    if lora.path is not None:
        check_imported(read_folder(lora.path), lora, read_shape(model.path), model.path)
    if not lora.rank:
        if lora.sync == "adapter":
            raise ConfigError(
                "model.lora.sync=adapter: with model.lora.rank=0 all weights are trained and there is no "
                "adapter; set model.lora.rank, or model.lora.sync=merged"
            )
        return
    field = f"model.lora.rank={lora.rank}"
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
    shape = read_shape(model.path)
    if shape.recurrent_layers:
        raise ConfigError(
            f"{field}: adapters of models with recurrent layers (model_type={shape.family}) are not "
            "supported yet; set model.lora.rank=0, which trains all weights"
        )
    check_targets(shape, lora.rank, lora.names, lora.targets)
    if lora.sync == "adapter":
        check_alone(shape, lora.rank)


def check_alone(shape: ModelShape, rank: int) -> None:
    """Raise ConfigError unless vLLM can apply adapters of this rank to the model itself."""
    remedy = "set model.lora.sync=merged"
    if rank > max(LORA_RANKS):
        raise ConfigError(
            f"model.lora.rank={rank}: vLLM applies adapters of rank {max(LORA_RANKS)} at most; choose a "
            f"lower rank, or {remedy}"
        )
    if shape.experts:
        raise ConfigError(
            "model.lora.sync=adapter: with it vLLM computes experts with kernels that a CPU cannot run, and "
            f"that are not tested here; {remedy}, or choose a model without experts"
        )


def check_imported(found: PeftFolder, lora: LoraConfig, shape: ModelShape, model: Path) -> None:
    """Raise ConfigError unless the adapter `found`, that of lora.path, has the section's rank, alpha and
    targets, and all A and B of a model of this shape."""
    field = f"model.lora.path={lora.path}"
    if other := different(found.recorded, model):
        raise ConfigError(
            f"{field}: was trained with another {other} than that of model.path={model}; give the model that "
            "it was trained on, or another adapter"
        )
    for name, given, there in (("rank", lora.rank, found.rank), ("alpha", lora.alpha, found.alpha)):
        if given != there:
            raise ConfigError(
                f"model.lora.{name}={given}: the adapter in {field} has {name} {there}; leave "
                f"model.lora.{name} out, or give another adapter"
            )
    wanted = adapter_shapes(shape, found.rank, found.targets)
    if adapted(shape, lora.names) != adapted(shape, found.targets):
        raise ConfigError(
            f"model.lora.targets={list(lora.targets)}: the adapter in {field} has {list(found.targets)}; "
            "leave model.lora.targets out, or give another adapter"
        )
    remedy = f"give an adapter of the model in model.path={model}"
    for key in sorted(wanted.keys() | found.shapes.keys()):
        if key not in found.shapes:
            raise ConfigError(f"{field}: has no {key}, but other layers' {key.split('.')[-3]}; {remedy}")
        if key not in wanted:
            raise ConfigError(f"{field}: has {key}, which this model does not have; {remedy}")
        if found.shapes[key] != wanted[key]:
            raise ConfigError(
                f"{field}: {key} has shape {list(found.shapes[key])}, here it must be {list(wanted[key])}; "
                + remedy
            )


def base_note(config: Config) -> str:
    """Return a line if the adapter in model.lora.path names another model than model.path, and has no hash of
    its weights, which would be compared. Return "" otherwise."""
    path, model = config.model.lora.path, config.model.path
    if path is None:
        return ""
    found = read_folder(path)
    if DIGEST in found.recorded or not found.base or _is_named(model, found.base):
        return ""
    return (
        f"model.lora.path={path}: its {SETTINGS} names the model {found.base[:200]!r}, and model.path={model}"
        "; only names and shapes of their weights were compared"
    )


def _is_named(model: Path, base: str) -> bool:
    """Return whether a model's folder has the name `base`, as a folder or in Hugging Face's cache.

    Example: "Qwen/Qwen3-8B" names models/Qwen3-8B and hub/models--Qwen--Qwen3-8B/snapshots/9c925d64.
    """
    folder = model.resolve()
    cached = f"models--{base.replace('/', '--')}"
    return Path(base).name == folder.name or cached in (*model.parts, *folder.parts)


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
