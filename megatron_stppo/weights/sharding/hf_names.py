"""The shape of a model and the tensor names of its Hugging Face checkpoint, without using transformers.

The shape is read from config.json. Its class is the model's family: see megatron_stppo/families/.
"""

import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding import hf_fields
from megatron_stppo.weights.sharding.parts import Attention, Experts, Mixer, Mlp, Shapes
from megatron_stppo.weights.sharding.tiles import Entry

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# of a critic: the head of transformers' ForTokenClassification with one label. Reward models have no bias.
VALUE, VALUE_BIAS = "score.weight", "score.bias"
Head = Literal["vocabulary", "value", "none"]
# one tensor of a file that holds a projection of all experts, gate above up
JOINED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)")
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. A subclass is a family: what it does in another way than this class.

    This class is a decoder of attention and MLP, or experts, with a norm before each. The rest of the package
    asks a shape, and names no family. Everything here is used without torch.
    """

    family: str  # model_type of config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert, in a model with experts
    vocab: int  # rows of the embedding, without padding
    tied: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    rope_factor: float | None = None  # factor of scaled rotary embeddings (hf_fields.SCALING); None: plain
    experts: int = 0  # per layer; 0: a dense model
    experts_per_token: int = 0
    renormalised: bool = True  # True: softmax over the chosen experts of a token; False: over all experts
    rotary_share: float = 1.0  # of a head, that is rotated

    # config.json
    model_type: ClassVar[str] = ""
    architecture: ClassVar[str] = ""  # the class of transformers, and of vLLM
    with_images: ClassVar[str] = ""  # model_type of models with images whose text part is of this family
    importers: ClassVar[Mapping[str, str]] = NONE  # {quant_method of published folders: script for them}
    missing: ClassVar[Mapping[str, Any]] = NONE  # values of missing fields, instead of those in MISSING
    fixed: ClassVar[Mapping[str, Any]] = NONE  # only supported values of fields, beside those in PLAIN
    unchecked: ClassVar[frozenset[str]] = frozenset()  # fields in PLAIN that may have any value
    ffn_field: ClassVar[str] = "intermediate_size"
    always_renormalised: ClassVar[bool] = True  # False: as norm_topk_prob says
    free_head_dim: ClassVar[bool] = True  # False: vLLM computes with hidden_size / num_attention_heads

    # tensors
    mixture: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    block: ClassVar[str] = "mlp"
    linears: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    norms: ClassVar[Mapping[str, str]] = MappingProxyType(  # {norm of a layer: megatron's local module}
        {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
    )
    left_out: ClassVar[tuple[str, ...]] = ()  # prefixes of tensors that are not read: of images, of drafts
    served: ClassVar[Mapping[str, str]] = NONE  # {part of a name in the checkpoint: part of vLLM's name}
    # ends of the names of weights whose columns tensor ranks divide; of an adapter B A, A has the columns
    row_parallel: ClassVar[tuple[str, ...]] = (
        *("o_proj.weight", "down_proj.weight"),
        *("o_proj.lora_A.weight", "down_proj.lora_A.weight"),
    )
    float32: ClassVar[tuple[str, ...]] = ()  # ends of the names of tensors with float32 at least

    # modules, see families/__init__.py: they are imported where they are needed
    layer_class: ClassVar[str] = "megatron_stppo.model.layers:Layers"
    cpu_engine: ClassVar[str] = ""  # module with what vLLM needs on a CPU before it builds such a model
    only_local: ClassVar[str] = ""  # what TransformerEngine's layers have not
    # vLLM's attention on GPUs of compute capability 9, and on others; None: as vLLM chooses
    gpu_attention: ClassVar[tuple[str, str] | None] = None
    repeats_kv_heads: ClassVar[bool] = True  # vLLM does, over more ranks than there are heads
    ffn_over_world: ClassVar[bool] = False  # vLLM divides it by the number of all ranks

    @classmethod
    def own_fields(cls, folder: Path, given: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of this class that follow from what other families do not have.

        given: read_fields(folder); rope: its rope_settings. Raises ConfigError for what is not supported.
        """
        hf_fields.check_only(folder, given, "layer_types", "full_attention")
        return {"rope_factor": hf_fields.rope_factor(folder, rope)}

    @classmethod
    def own_rope(cls, given: Mapping[str, Any], rope: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of rotary embeddings in one of config.json's objects, before they are joined
        with those outside it."""
        return rope

    def mixer(self, layer: int) -> Mixer:
        """Return what mixes the tokens in a layer."""
        return Attention(self.hidden, self.heads, self.kv_heads, self.head_dim, self.qkv_bias, self.qk_norm)

    @property
    def mlp(self) -> Mlp:
        """The other part of every layer."""
        if not self.experts:
            return Mlp(self.hidden, self.ffn, self.linears)
        return Experts(self.hidden, self.ffn, self.linears, self.experts, self.experts_per_token)

    @classmethod
    def held(cls, entry: Entry) -> dict[str, Entry]:
        """Return the tensors, by their names here, that a file's tensor holds; under its own name if there
        are none. Here: the projections of all experts in one tensor."""
        joined = JOINED.fullmatch(entry.key)
        if joined is None or len(entry.shape) != 3:
            return {entry.key: entry}
        experts, rows, columns = entry.shape
        linears = ("gate_proj", "up_proj") if joined[2] == "gate_up_proj" else ("down_proj",)
        each = rows // len(linears)
        return {
            f"{joined[1]}{expert}.{linear}.weight": entry._replace(
                shape=(each, columns), part=(expert, n * each)
            )
            for expert in range(experts)
            for n, linear in enumerate(linears)
        }

    @classmethod
    def stored(cls, name: str) -> str:
        """Return the name that a tensor has in files, or that of the stack that holds it."""
        return name

    @classmethod
    def is_stack(cls, stored: str) -> bool:
        """Return whether a file's tensor stacks the transposes of the tensors that it holds."""
        return False

    @property
    def divided(self) -> dict[str, int]:
        """The sizes, by their fields in config.json, that tensor ranks divide, beside heads."""
        return {self.ffn_field: self.ffn}

    def cpu_obstacle(self, tensor: int) -> str:
        """Return why vLLM cannot compute the experts on a CPU with this number of ranks, or ""."""
        return f"experts of hidden_size={self.hidden}" if self.experts and self.hidden % 32 else ""

    @property
    def mixers(self) -> list[Mixer]:
        """Those of all layers."""
        return [self.mixer(layer) for layer in range(self.layers)]

    @property
    def recurrent_layers(self) -> int:
        """The number of layers that pass a state from token to token."""
        return sum(mixer.recurrent for mixer in self.mixers)

    def padded_vocab(self, tensor: int) -> int:
        """Return the rows that megatron allocates: `vocab` rounded up to a multiple of 128 * tensor."""
        unit = 128 * tensor
        return -(-self.vocab // unit) * unit

    def prefixes(self, layer: int) -> tuple[str, str, str]:
        """Return the beginnings of a layer's names, those of its mixer and those of its MLP."""
        prefix = f"model.layers.{layer}."
        return prefix, f"{prefix}{self.mixer(layer).name}.", f"{prefix}{self.block}."


@functools.cache
def families() -> Mapping[str, type[ModelShape]]:
    """Return {model_type: family} of all modules in megatron_stppo.families."""
    package = importlib.import_module("megatron_stppo.families")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {kind.model_type: kind for kind in _subclasses(ModelShape) if kind.model_type}


def _subclasses(kind: type[ModelShape]) -> Iterator[type[ModelShape]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of folder/config.json, with the values of those that are missing.

    Raises ConfigError if the file is missing or the model is not supported.
    """
    raw = text_fields(folder, hf_fields.read(folder))
    name = raw.get("model_type")
    family = families().get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"{folder}: model_type={name!r} is not supported; choose one of {sorted(families())}"
        )
    hf_fields.check_quantised(folder, raw, family.importers)
    hf_fields.check_plain(folder, raw, family.fixed, family.unchecked)
    return hf_fields.MISSING | dict(family.missing) | raw


def text_fields(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model: those of text_config, if config.json is of a model with images."""
    name = raw.get("model_type")
    text = next((kind for kind in families().values() if name and kind.with_images == name), None)
    return dict(raw) if text is None else hf_fields.text(folder, raw, text.model_type, text.architecture)


def read_shape(folder: Path) -> ModelShape:
    """Read folder/config.json. Raises ConfigError if it is missing or the model is not supported."""
    given = read_fields(folder)
    name, family = given["model_type"], families()[given["model_type"]]
    count = functools.partial(hf_fields.count_of, folder, given)
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    head_dim, rope = (
        count("head_dim", hidden // heads),
        hf_fields.rope_settings(folder, given, family.own_rope),
    )
    if not family.free_head_dim and head_dim != hidden // heads:
        raise ConfigError(
            f"{folder}: head_dim={head_dim} of model_type={name!r} is not supported, vLLM computes with "
            f"hidden_size / num_attention_heads = {hidden // heads}; use a checkpoint with that head_dim"
        )
    return family(
        family=name,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=count(family.ffn_field),
        vocab=count("vocab_size"),
        tied=hf_fields.flag_of(folder, given, "tie_word_embeddings"),
        rope_theta=hf_fields.rate_of(folder, rope, "rope_theta"),
        norm_eps=hf_fields.rate_of(folder, given, "rms_norm_eps"),
        max_positions=count("max_position_embeddings"),
        experts=count(hf_fields.experts_field(folder, given)) if family.mixture else 0,
        experts_per_token=count("num_experts_per_tok") if family.mixture else 0,
        renormalised=family.always_renormalised or hf_fields.flag_of(folder, given, "norm_topk_prob"),
        **family.own_fields(folder, given | {"head_dim": head_dim}, rope),
    )


def hf_shapes(shape: ModelShape, head: Head = "vocabulary") -> Shapes:
    """Return {name: shape} of every tensor of the checkpoint. A tied checkpoint has no lm_head."""
    hidden = shape.hidden
    shapes: Shapes = {EMBEDDING: (shape.vocab, hidden), NORM: (hidden,)}
    if head == "vocabulary" and not shape.tied:
        shapes[HEAD] = (shape.vocab, hidden)
    if head == "value":
        shapes |= {VALUE: (1, hidden), VALUE_BIAS: (1,)}
    for layer in range(shape.layers):
        prefix, of_mixer, of_mlp = shape.prefixes(layer)
        shapes |= shape.mixer(layer).shapes(of_mixer) | shape.mlp.shapes(of_mlp)
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in shape.norms}
    return shapes
