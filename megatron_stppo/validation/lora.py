"""Check `model.lora` against the model. Uses no process group."""

from collections.abc import Iterator
from pathlib import Path

from megatron_stppo.cluster.launch.vllm_environment import LORA_RANKS
from megatron_stppo.config import Config, ConfigError, LoraConfig
from megatron_stppo.config.peft_folder import DIGEST, SETTINGS, PeftFolder, read_folder
from megatron_stppo.config.section import Rule, enforce
from megatron_stppo.data.text.tokenizer_files import different
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape
from megatron_stppo.weights.sharding.low_rank import adapted, adapter_shapes


def check(config: Config) -> None:
    """Raise ConfigError unless the model's layers can have these adapters, and model.lora.path holds such."""
    lora, model = config.model.lora, config.model
    if lora.path is not None:
        enforce(imported(read_folder(lora.path), lora, read_shape(model.path), model.path))
    enforce(rules(config))


def rules(config: Config) -> Iterator[Rule]:
    """Return the rules about what adapters exclude, and about the model's layers."""
    lora, model = config.model.lora, config.model
    yield Rule(
        not lora.rank and lora.sync == "adapter",
        "model.lora.sync=adapter: with model.lora.rank=0 all weights are trained and there is no adapter",
        "set model.lora.rank, or model.lora.sync=merged",
    )
    if not lora.rank:
        return
    field = f"model.lora.rank={lora.rank}"
    yield Rule(
        model.critic_path is not None,
        f"model.critic_path={model.critic_path}: with {field} the critic shares the actor's weights",
        "leave it out, or set model.lora.rank=0",
    )
    yield Rule(
        model.layers == "transformer_engine",
        f"model.layers=transformer_engine: its layers do not return the input of an adapter ({field})",
        "set model.layers=local",
    )
    shape = read_shape(model.path)
    yield Rule(
        bool(shape.recurrent_layers),
        f"{field}: adapters of models with recurrent layers (model_type={shape.family}) are not supported "
        "yet",
        "set model.lora.rank=0, which trains all weights",
    )
    yield from of_targets(shape, lora.rank, lora.names, lora.targets)
    if lora.sync == "adapter":
        yield from alone(shape, lora.rank)


def alone(shape: ModelShape, rank: int) -> Iterator[Rule]:
    """Return the rules by which vLLM can apply adapters of this rank to the model itself."""
    remedy = "set model.lora.sync=merged"
    yield Rule(
        rank > max(LORA_RANKS),
        f"model.lora.rank={rank}: vLLM applies adapters of rank {max(LORA_RANKS)} at most",
        f"choose a lower rank, or {remedy}",
    )
    yield Rule(
        bool(shape.experts),
        "model.lora.sync=adapter: with it vLLM computes experts with kernels that a CPU cannot run, and that "
        "are not tested here",
        f"{remedy}, or choose a model without experts",
    )


def imported(adapter: PeftFolder, lora: LoraConfig, shape: ModelShape, model: Path) -> Iterator[Rule]:
    """Return the rules by which the adapter in lora.path has the section's rank, alpha and targets, and all A
    and B of a model of this shape."""
    field, another = f"model.lora.path={lora.path}", different(adapter.recorded, model)
    yield Rule(
        bool(another),
        f"{field}: was trained with another {another} than that of model.path={model}",
        "give the model that it was trained on, or another adapter",
    )
    for name, given, own in (("rank", lora.rank, adapter.rank), ("alpha", lora.alpha, adapter.alpha)):
        yield Rule(
            given != own,
            f"model.lora.{name}={given}: the adapter in {field} has {name} {own}",
            f"leave model.lora.{name} out, or give another adapter",
        )
    yield Rule(
        adapted(shape, lora.names) != adapted(shape, adapter.targets),
        f"model.lora.targets={list(lora.targets)}: the adapter in {field} has {list(adapter.targets)}",
        "leave model.lora.targets out, or give another adapter",
    )
    wanted, there = adapter_shapes(shape, adapter.rank, adapter.targets), adapter.shapes
    remedy = f"give an adapter of the model in model.path={model}"
    for key in sorted(wanted.keys() | there.keys()):
        kind = key.split(".")[-3]
        yield Rule(key not in there, f"{field}: has no {key}, but other layers' {kind}", remedy)
        yield Rule(key not in wanted, f"{field}: has {key}, which this model does not have", remedy)
        sizes = f"{list(there[key])}, here it must be {list(wanted[key])}"
        yield Rule(there[key] != wanted[key], f"{field}: {key} has shape {sizes}", remedy)


def of_targets(
    shape: ModelShape, rank: int, names: tuple[str, ...], targets: tuple[str, ...]
) -> Iterator[Rule]:
    """Return the rules by which every target of `targets` has layers of at least this rank.

    names: the targets without all-linear.
    """
    of_experts = [name for name in targets if name in ("gate_proj", "up_proj", "down_proj")]
    yield Rule(
        bool(shape.experts and of_experts),
        f"model.lora.targets={list(targets)}: {''.join(of_experts[:1])} belongs to the experts, and an "
        "adapter would be needed for each of them",
        "choose from q_proj, k_proj, v_proj and o_proj",
    )
    layers = adapted(shape, names)
    problem = f"model.lora.targets={list(targets)}: matches no layer"
    yield Rule(not layers, problem, "give at least one, or all-linear")
    smallest = min(layers, key=lambda key: min(layers[key]))
    largest = min(layers[smallest])
    yield Rule(
        rank > largest,
        f"model.lora.rank={rank}: is larger than the smallest dimension of {smallest}, {largest}",
        f"choose 1 to {largest}",
    )


def base_note(config: Config) -> str:
    """Return a line if the adapter in model.lora.path names another model than model.path, and has no hash of
    its weights, which would be compared. Return "" otherwise."""
    path, model = config.model.lora.path, config.model.path
    if path is None:
        return ""
    adapter = read_folder(path)
    if DIGEST in adapter.recorded or not adapter.base or _is_named(model, adapter.base):
        return ""
    return (
        f"model.lora.path={path}: its {SETTINGS} names the model {adapter.base[:200]!r}, and "
        f"model.path={model}; only names and shapes of their weights were compared"
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
