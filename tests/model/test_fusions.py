"""Which of megatron's fused kernels are used, and the rotary embedding of local layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model import fusing
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


def decide(places: list[dict[str, Any]], given: dict[str, Any]) -> list[tuple[dict[str, bool], str, str]]:
    found: list[tuple[dict[str, bool], str, str]] = run_ranks(fusing.decided, 1, places, given)[0]
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
    at = run_ranks(fusing.on_this_machine, 1, 4)[0]
    assert (at["on_gpu"], at["layers"], at["has_experts"]) == (False, "local", True)
    assert not any(decide([at | {"rotary_kernel": True}], {})[0][0].values())


def test_a_cpu_run_fuses_the_gradients_of_the_weights_if_it_is_asked_to() -> None:
    ((fields, _, message),) = decide([WHOLE | {"on_gpu": False, "layers": "local"}], {GRADIENTS: True})
    assert (fields, message) == ({SWIGLU: False, ROTARY: False, GRADIENTS: True}, "")


def test_megatron_has_every_field_of_the_table() -> None:
    assert all(run_ranks(fusing.known_fields, 1)[0])


def test_angles_from_a_table_rotate_as_megatrons_packed_sequences_bit_for_bit() -> None:
    run_ranks(fusing.rotations, 1)


def test_the_attention_backend_is_given_to_megatron_as_its_own_type() -> None:
    """megatron compares it with its enumeration, and ignores a text."""
    assert run_ranks(fusing.attention_backend, 1, "unfused") == ["AttnBackend.unfused"]


def test_auto_is_local_where_transformer_engine_is_installed_but_it_can_be_chosen() -> None:
    """Its layers have not completed a step on a GPU."""
    chosen = {name: run_ranks(fusing.layers_with_transformer_engine, 1, name)[0] for name in CHOICES}
    assert chosen == CHOICES
