"""The trainer's models are those of transformers, in float64 and packed: log-probs and gradients."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.cluster.launch import process
from tests.ranks import run_ranks
from tests.training.update.layouts import write_model

LENGTHS = (70, 1, 64, 5)  # more and fewer tokens than a window, and than a chunk


def both(folder: Path) -> tuple[dict[str, float], list[float]]:
    """Return {checkpoint name: relative difference of gradients}, and the differences of the log-probs."""
    process.prepare(engine=False)
    from megatron_stppo.base.types import Task, Trajectory, Turn
    from megatron_stppo.checkpoint.convert import gather
    from megatron_stppo.config import Config
    from megatron_stppo.data.packing import PackingSpec, pack, to_batch
    from megatron_stppo.model import build
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import hf_shapes, read_shape
    from megatron_stppo.weights.sharding.hf_write import as_stored
    from megatron_stppo.weights.sharding.spans import training_layouts

    torch.set_num_threads(1)
    config = Config.model_validate({"model": {"path": folder}})
    mesh, shape = groups.initialize(config.parallel), read_shape(folder)
    generator = torch.Generator().manual_seed(1)
    played, weigh = [], torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    for n in LENGTHS:
        prompt, *answer = torch.randint(0, shape.vocab, (n + 1,), generator=generator).tolist()
        turn = Turn(tuple(answer), (0.0,) * n, (), 0.0, ((0, n),))
        played.append(Trajectory(Task("t", (), ("a",), "train", 0), (prompt,), (turn,), "ok"))
    batch = to_batch(played)
    (one,) = pack(batch, range(len(LENGTHS)), PackingSpec(1000))
    (model,) = build.from_hf("actor", shape, config, mesh, torch.float64)
    theirs = in_float64(folder)
    model.rotary_pos_emb.inv_freq = theirs.model.rotary_emb.inv_freq  # megatron computes it in float32
    hidden = model(one)
    logits = hidden @ model.vocabulary_weight().t()
    own = logits[:, : shape.vocab].log_softmax(-1).gather(1, one.target_T[:, None])[:, 0]
    order = one.rows_T
    (own * weigh[order]).sum().backward()
    parameters = {name: p.grad for name, p in build.named_parameters([model]).items()}
    shapes = hf_shapes(shape)
    found = as_stored(shape, gather(parameters, training_layouts(shape, mesh.layout), shape, shapes, shapes))
    expected = torch.cat([
        theirs(torch.tensor([[*t.prompt_ids, *t.turns[0].token_ids]]), use_cache=False)
        .logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(t.turns[0].token_ids)[:, None])[:, 0]
        for t in played
    ])  # fmt: skip
    (expected * weigh).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    apart = {name: float((found[name] - p).norm() / p.norm()) for name, p in gradients.items()}
    assert apart.keys() == found.keys()
    return apart, (own - expected[order]).abs().tolist()


def in_float64(folder: Path) -> Any:
    """Return the model of transformers, which converts to float32 in places, here to float64; megatron's
    router too. Replaces functions of this process."""
    from megatron.core.transformer.moe import moe_utils
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = AutoConfig.from_pretrained(folder).model_type.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")

    class Float64(types.ModuleType):
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    moe_utils.torch = modeling.torch = Float64("torch")
    torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment]
    kinds: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **kinds).double()
    rope = model.model.rotary_emb
    if rope.rope_type == "default":
        rope.inv_freq = rope.compute_default_rope_parameters(model.config)[0]
    return model


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss"])
def test_packed_sequences_have_the_logprobs_and_gradients_of_transformers(
    tmp_path: Path, family: str
) -> None:
    write_model(tmp_path, family)
    ((gradients, logprobs),) = run_ranks(both, 1, tmp_path)
    assert max(logprobs) < 1e-12
    assert max(gradients.values()) < 1e-11, max(gradients, key=gradients.__getitem__)
