"""Functions that run on a rank: decisions about fused kernels, and the rotary embedding."""

from __future__ import annotations

from typing import Any

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError


def decided(places: list[dict[str, Any]], given: dict[str, Any]) -> list[tuple[dict[str, bool], str, str]]:
    """Return (fields, summary, message of check) for every place."""
    process.prepare(engine=False)
    from megatron_stppo.model import fusions

    found = []
    for fields in places:
        at = fusions.Place(**fields)
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
    from dataclasses import asdict, replace

    from megatron_stppo.families.llama import Qwen2
    from megatron_stppo.model.fusions import Place

    shape = Qwen2("qwen2", 8, 64, 8, 4, 8, 96, 512, False, 1e6, 1e-6, 512)
    config = Config.model_validate({"model": {"path": "none"}})
    return asdict(Place.of(config, replace(shape, experts=experts), on_gpu=False))


def layers_with_transformer_engine(given: str) -> str:
    """Return the layers of a run with this model.layers, as if TransformerEngine and a GPU were there."""
    process.prepare(engine=False)
    from unittest import mock

    import torch

    from megatron_stppo.model.layers import gpt_layer_specs, layer_spec

    config = Config.model_validate({"model": {"path": "none", "layers": given}})
    with mock.patch.object(gpt_layer_specs, "HAVE_TE", True):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            return layer_spec(config)


def attention_backend(given: str) -> str:
    """Return the name of the attention backend in megatron's configuration, of `given` in a run's."""
    process.prepare(engine=False)
    import torch

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
    from dataclasses import fields

    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_stppo.model.fusions import NAMES

    names = {field.name for field in fields(TransformerConfig)}
    return [field in names for field in NAMES]


def rotations() -> None:
    """Compare Rotation with megatron's packed rotary embedding: values and gradients, bit for bit."""
    process.prepare(engine=False)
    import torch
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
