"""Which of megatron's fused kernels are used, and the rotary embedding of local layers."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from tests.ranks import run_ranks

SWIGLU, ROTARY, GRADIENTS = "bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"
# An H100 with TransformerEngine.
WHOLE = {
    "on_gpu": True,
    "layers": "transformer_engine",
    "has_experts": False,
    "rotary_kernel": True,
}
# {model.layers: the layers that are built}
CHOICES = {"auto": "local", "local": "local", "transformer_engine": "transformer_engine"}
# {change of WHOLE: the fusions that are used}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {SWIGLU, ROTARY, GRADIENTS}),
    ({"has_experts": True}, {SWIGLU, ROTARY, GRADIENTS}),
    ({"on_gpu": False}, set()),
    ({"rotary_kernel": False}, {SWIGLU, GRADIENTS}),
    ({"layers": "local"}, {SWIGLU, GRADIENTS}),
    ({"layers": "local", "has_experts": True}, {GRADIENTS}),
    ({"has_experts": True, "on_gpu": False}, set()),
]


def decided(places: list[dict[str, Any]], given: dict[str, Any]) -> list[tuple[dict[str, bool], str, str]]:
    """Return (fields, summary, message of check) for every place."""
    process.prepare(engine=False)
    from megatron_stppo.model import fusions

    found = []
    for place in places:
        at = fusions.Place(**place)
        message = ""
        try:
            fusions.check(at, given)
        except ConfigError as error:
            message = str(error)
        found.append((fusions.fields(at, given), fusions.summary(at, given), message))
    return found


def on_this_machine(experts: int) -> dict[str, Any]:
    """Return the place of a run on this CPU with the packages that are installed."""
    process.prepare(engine=False)
    from megatron_stppo.families.llama import Qwen2
    from megatron_stppo.model.fusions import Place

    shape = Qwen2("qwen2", 8, 64, 8, 4, 8, 96, 512, False, 1e6, 1e-6, 512)
    config = Config.model_validate({"model": {"path": "none"}})
    return asdict(Place.of(config, replace(shape, experts=experts), on_gpu=False))


def layers_with_transformer_engine(given: str) -> str:
    """Return the layers of a run with this model.layers, as if TransformerEngine and a GPU were there."""
    process.prepare(engine=False)
    from megatron_stppo.model.layers import gpt_layer_specs, layer_spec

    config = Config.model_validate({"model": {"path": "none", "layers": given}})
    with mock.patch.object(gpt_layer_specs, "HAVE_TE", True):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            return layer_spec(config)


def attention_backend(given: str) -> str:
    """Return the name of the attention backend in megatron's configuration, of `given` in a run's."""
    process.prepare(engine=False)
    from megatron_stppo.families.llama import Qwen2
    from megatron_stppo.model.build import transformer_config
    from megatron_stppo.parallel import groups

    shape = Qwen2("qwen2", 8, 64, 8, 4, 8, 96, 512, False, 1e6, 1e-6, 512)
    config = Config.model_validate({"model": {"path": "none"}, "megatron": {"attention_backend": given}})
    mesh = groups.initialize(config.parallel)
    return str(transformer_config(shape, config, mesh, torch.float32).attention_backend)


def known_fields() -> list[bool]:
    """Return whether each field of a fusion is one of megatron's TransformerConfig."""
    process.prepare(engine=False)
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_stppo.model.fusions import NAMES

    names = {field.name for field in fields(TransformerConfig)}
    return [field in names for field in NAMES]


def rotations() -> None:
    """Compare Rotation with megatron's packed rotary embedding: values and gradients, bit for bit."""
    process.prepare(engine=False)
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_stppo.model.attention import Rotation

    class Alone:  # the context group of a run without context parallelism
        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

    lengths, heads, size = [5, 1, 9], 3, 8
    angles = RotaryEmbedding(size, 1.0, use_cpu_initialization=True, cp_group=Alone())(9)
    offsets = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    position = torch.cat([torch.arange(n) for n in lengths])
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(15, heads, size, generator=generator).to(dtype).requires_grad_()
        given = torch.randn(15, heads, size, generator=generator).to(dtype)
        ours = Rotation.of(angles[position, 0], dtype)(x)
        theirs = _apply_rotary_pos_emb_thd(x, offsets, angles, cp_group=Alone())
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad((y * given).sum(), x)[0] for y in (ours, theirs)]
        assert torch.equal(*gradients)


def decide(places: list[dict[str, Any]], given: dict[str, Any]) -> list[tuple[dict[str, bool], str, str]]:
    found: list[tuple[dict[str, bool], str, str]] = run_ranks(decided, 1, places, given)[0]
    return found


def test_every_fusion_is_used_where_its_needs_are_met_and_nowhere_else() -> None:
    found = decide([WHOLE | change for change, _ in CASES], {})
    assert [{field for field, on in fields.items() if on} for fields, _, _ in found] == [
        used for _, used in CASES
    ]
    assert {message for _, _, message in found} == {""}


def test_the_opening_line_says_what_is_fused_and_why_the_rest_is_not() -> None:
    (_, everything, _), (_, local, _), (_, off, _) = [
        *decide([WHOLE, WHOLE | {"layers": "local", "has_experts": True}], {}),
        *decide([WHOLE], {SWIGLU: False}),
    ]
    assert everything == "fused: SwiGLU, rotary embedding, gradients of the weights"
    assert local == (
        "fused: gradients of the weights; not fused: SwiGLU (local experts have products of their own), "
        "rotary embedding (local layers read each token's angles from a table)"
    )
    assert off.endswith("; not fused: SwiGLU (megatron.bias_activation_fusion=false)")


@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        (SWIGLU, {"on_gpu": False}, "there is no GPU"),
        (ROTARY, {"layers": "local"}, "local layers read each token's angles from a table"),
    ],
)
def test_a_fusion_that_cannot_be_used_is_refused_with_the_reason(
    field: str, change: dict[str, Any], reason: str
) -> None:
    ((_, _, refused), (_, _, allowed)) = decide([WHOLE | change, WHOLE], {field: True})
    assert refused == f"megatron.{field}=True: {reason}; leave it out"
    assert allowed == ""


def test_a_cpu_run_fuses_nothing_whatever_is_installed() -> None:
    at = run_ranks(on_this_machine, 1, 4)[0]
    assert (at["on_gpu"], at["layers"], at["has_experts"]) == (False, "local", True)
    assert not any(decide([at | {"rotary_kernel": True}], {})[0][0].values())


def test_a_cpu_run_fuses_the_gradients_of_the_weights_if_it_is_asked_to() -> None:
    ((fields, _, message),) = decide([WHOLE | {"on_gpu": False, "layers": "local"}], {GRADIENTS: True})
    assert (fields, message) == ({SWIGLU: False, ROTARY: False, GRADIENTS: True}, "")


def test_megatron_has_every_field_of_the_table() -> None:
    assert all(run_ranks(known_fields, 1)[0])


def test_angles_from_a_table_rotate_as_megatrons_packed_sequences_bit_for_bit() -> None:
    run_ranks(rotations, 1)


def test_the_attention_backend_is_given_to_megatron_as_its_own_type() -> None:
    """megatron compares it with its enumeration, and ignores a text."""
    assert run_ranks(attention_backend, 1, "unfused") == ["AttnBackend.unfused"]


def test_auto_is_local_where_transformer_engine_is_installed_but_it_can_be_chosen() -> None:
    """Its layers have not completed a step on a GPU."""
    chosen = {name: run_ranks(layers_with_transformer_engine, 1, name)[0] for name in CHOICES}
    assert chosen == CHOICES
