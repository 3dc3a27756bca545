"""The sections `model` and `parallel`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field

from megatron_stppo.config.section import Section

Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Target = Literal["all-linear", Linear]
LINEAR: tuple[str, ...] = get_args(Linear)


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class LoraConfig(Section):
    """Low-rank adapters (LoRA): W + alpha / rank * B A, of which only A and B are trained."""

    rank: int = Field(0, ge=0)
    """0: no adapters, all weights are trained; with path: its rank"""
    alpha: float = Field(32.0, gt=0)
    """B A is multiplied by alpha / rank; with path: its alpha"""
    targets: Annotated[tuple[Target, ...], BeforeValidator(_several)] = ("all-linear",)
    """layers with an adapter, by their Hugging Face names; all-linear: all but those of experts; with path:
    its layers"""
    path: Path | None = None
    """folder of an adapter of the package peft, with which actor, critic and reference begin; default:
    adapters that add 0"""
    sync: Literal["merged", "adapter"] = "merged"
    """what the engine gets. merged: W + alpha / rank * B A of the layers with an adapter; adapter: A and B,
    for vLLM's own LoRA"""

    @property
    def names(self) -> tuple[str, ...]:
        """The targets by name; none without adapters."""
        if not self.rank:
            return ()
        return LINEAR if "all-linear" in self.targets else self.targets

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class ModelConfig(Section):
    path: Path
    """Hugging Face checkpoint folder: config.json, tokenizer.json, *.safetensors"""
    critic_path: Path | None = None
    """Hugging Face folder with which the critic begins, also its value head if `cold-start --critic` has
    written the folder; default: path"""
    reference_path: Path | None = None
    """Hugging Face folder of the KL penalty's reference, such as a teacher, of any size, with the same
    tokens; default: path"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on CPU, bfloat16 on GPU"""
    head_dtype: Literal["auto", "float32", "model"] = "auto"
    """type of the logits, in engine and trainer. auto: float32 on GPU; model: dtype"""
    layers: Literal["local", "transformer_engine", "auto"] = "local"
    """local: megatron-core's own; transformer_engine: has not completed a training step on a GPU; auto:
    local, until it has"""
    delta_net: Literal["torch", "fla"] = "torch"
    """kernels of gated delta nets. fla: flash-linear-attention, and causal-conv1d if installed, on a GPU in
    bfloat16; they have not run on a GPU yet"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activations recomputed in the backward pass: none, attention, every layer"""

    template_arguments: dict[str, bool | int | float | str] = Field({})
    """variables of the chat template, such as {enable_thinking: false}, for every prompt of the run"""

    lora: LoraConfig = LoraConfig()

    @property
    def in_torch(self) -> Self:
        """A copy whose layers are operations of torch; other kernels have no shapes without data."""
        return self.changed(delta_net="torch")

    def float32_logits(self, on_gpu: bool) -> bool:
        """Return whether logits are computed in float32 even if the model is in bfloat16."""
        return self.head_dtype == "float32" or (self.head_dtype == "auto" and on_gpu)


class ParallelConfig(Section):
    """Axes of the device mesh; data parallelism takes the remaining ranks."""

    tensor: int = Field(1, ge=1)
    """ranks that split every matrix of a layer"""
    sequence: bool = False
    """sequence parallelism; needs tensor > 1"""
    context: int = Field(1, ge=1)
    """ranks that divide the tokens of every trajectory"""
    expert: int = Field(1, ge=1)
    """ranks that divide a layer's experts; must divide the data and context ranks"""
    pipeline: int = Field(1, ge=1)
    """ranks that split the layers into stages"""
    virtual: int = Field(1, ge=1)
    """model chunks per pipeline rank (interleaved schedule)"""
    first_stage_layers: int | None = Field(None, ge=1)
    """layers of the first stage; default: as many as the others"""
    last_stage_layers: int | None = Field(None, ge=1)
    """layers of the last stage; default: as many as the others"""
