"""Functions that run on a rank: one actor step and one critic step on a fixed batch, under a layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from megatron_stppo.weights.sharding.hf_fields import SCALING

# No clipping by norm, so that the gradients after the step are those of the loss.
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01, "grad_clip": 1e9, "warmup_fraction": 0.0}
HEAD_SCALE = 0.2  # of the critic's head: with its initial value 0 the trunk would get no gradient

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **SCALING}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
# three gated delta nets, then attention
HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "num_key_value_heads": 1,  # fewer than tensor ranks
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
MIXTURE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
# {family: (prefix of its classes in transformers, differences from SIZES)}
OF_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 1, "rope_parameters": SCALED}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "qwen3_5_moe": ("Qwen3_5Moe", HYBRID | MIXTURE),
    "qwen3_next": ("Qwen3Next", HYBRID | MIXTURE),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "max_position_embeddings": 256,
            "rope_parameters": YARN,
        },
    ),
}


def write_model(folder: Path, family: str = "qwen3", **changes: Any) -> None:
    """Write a tiny random model of 4 layers with an odd vocabulary size. OF_FAMILY has its differences."""
    import torch
    import transformers

    torch.manual_seed(0)
    prefix, special = OF_FAMILY[family]
    sizes = SIZES | special | changes
    if family == "qwen3_5_moe":  # its configuration has no such field
        sizes = {name: value for name, value in sizes.items() if name != "intermediate_size"}
    text = "Text" if prefix.startswith("Qwen3_5") else ""
    shape = getattr(transformers, f"{prefix}{text}Config")(**sizes)
    model = getattr(transformers, f"{prefix}ForCausalLM")(shape).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:  # change norms and biases from their initial ones and zeros
                parameter.add_(0.1 * torch.sin(torch.arange(len(parameter)) + len(key)))
            if key.endswith("A_log"):  # decays as a trained model has them; initial ones forget at once
                parameter.copy_(torch.linspace(-3, 1, len(parameter)))
            if key.endswith("proj_bias"):  # of experts, with gates on both sides of their limit
                parameter.add_(3 * torch.sin(3.0 * torch.arange(parameter.numel())).view_as(parameter))
    model.save_pretrained(folder)


def value_head(hidden: int) -> Any:
    import torch

    return HEAD_SCALE * torch.cos(torch.arange(hidden, dtype=torch.float64))[None]


def batch(same: int = 4) -> Any:
    """Return 8 trajectories of 1 to 3 turns, two for each of 4 prompts. One pair has its first
    `same` action tokens in common too.

    One trajectory failed. Advantages vary inside turns; some turns are clipped.
    """
    import torch

    from megatron_stppo.base.types import Task, Trajectory, Turn, UpdatedBatch
    from megatron_stppo.data.packing import to_batch

    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 301, (n,), generator=generator).tolist())

    task = Task("t", (), ("a",), "train", 0)
    sizes = [((3, 4), (2, 0)), ((5, 2), (1, 3), (4, 0)), ((6, 0),), ((2, 5), (7, 0))] * 2
    prompts = [ids(4 + n) for n in range(4)] * 2
    played: list[Trajectory] = []
    for n, turns in enumerate(sizes):
        made = [Turn(ids(a), (0.0,) * a, ids(o), 0.0, ((0, a),)) for a, o in turns]
        if n == 6:
            first = played[2].turns[0].token_ids[:same]
            made[0] = replace(made[0], token_ids=first + made[0].token_ids[same:])
        played.append(Trajectory(task, prompts[n], tuple(made), "timeout" if n == 5 else "ok"))
    packed = to_batch(played)
    tokens = len(packed.action_index_T)

    def random_T(scale: float, offset: float = 0.0) -> Any:
        return torch.randn(tokens, generator=generator) * scale + offset

    def random_R() -> Any:
        written = sum(sum(a + o for a, o in turns) for turns in sizes)
        return torch.randn(2, written, generator=generator) * torch.tensor([[0.3], [1.0]])

    return UpdatedBatch.of(
        packed,
        epochs=(),
        old_logprob_T=random_T(0.6),  # an offset that `with_old` adds to the model's own log-probs
        advantage_T=random_T(1.0),
        value_T=random_T(0.3),
        return_T=random_T(1.0),
        reference_logprob_T=random_T(0.5, -5.0),
        **dict(zip(("value_R", "return_R"), random_R(), strict=True)),
    )


def learner_of(model: str, /, **sections: Any) -> Any:
    """Return a learner of a model's folder, with these sections of a configuration. Collective.

    A process may call it again, also for another layout.
    """
    process.prepare(engine=False)
    import torch
    from megatron.core import parallel_state

    from megatron_stppo.config import Config
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    torch.set_num_threads(1)
    config = Config.model_validate({**sections, "model": {"path": model, **sections.get("model", {})}})
    known = parallel_state.model_parallel_is_initialized()
    mesh = (groups.replace if known else groups.initialize)(config.parallel)
    return build_learner(config, read_shape(Path(model)), mesh, torch.float32)


def estimated(learner: Any, iteration: int) -> Any:
    """Return `batch`, scored for an iteration, with its own advantages and returns."""
    from megatron_stppo.base.types import EstimatedBatch
    from megatron_stppo.training.stages import divided, score

    given, names = batch(), ("advantage_T", "return_T", "return_R")
    scored = score(learner, divided(learner, given, iteration))
    return EstimatedBatch.of(scored, **{name: getattr(given, name) for name in names})


def steps(
    model: str,
    parallel: dict[str, Any],
    budgets: tuple[int, ...],
    distributed: bool,
    algorithm: dict,
    out: str,
    recompute: str = "none",
    fused: bool = False,
) -> Any:
    """Return the steps' numbers, the actor's log-probs and the critic's values, per budget of tokens.

    The values are those of all tokens after the prompts. Two critics are trained, the second on observations
    too. For the last budget, `out` gets the updated actor and its gradients as Hugging Face folders.
    """
    process.prepare(engine=False)
    import torch

    from megatron_stppo.checkpoint.convert import export_hf
    from megatron_stppo.config import Config
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import logprobs, packer_of, values
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.advantage import with_observations
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.training.update.critic_step import critic_step
    from megatron_stppo.training.update.ratios import Ratios
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from megatron_stppo.weights.sharding.spans import training_layouts

    torch.set_num_threads(1)
    config = Config.model_validate(
        {
            "model": {"path": model, "recompute": recompute},
            "parallel": parallel,
            "update": {role: SETTINGS | {"distributed": distributed} for role in ("actor", "critic")},
            "algorithm": algorithm,
            "megatron": {"gradient_accumulation_fusion": True} if fused else {},
        }
    )
    mesh = groups.initialize(config.parallel)
    shape, a = read_shape(Path(model)), config.algorithm
    results = []
    for budget in budgets:
        roles = ("actor", "critic", "critic")
        actor, critic, second = (build.trainer(role, shape, config, mesh, torch.float32) for role in roles)
        packer = packer_of(config, shape, mesh)
        packer = replace(packer, spec=replace(packer.spec, budget=budget))
        every = packer.whole(batch())
        if mesh.is_last_stage:
            for trainer in (critic, second):
                trainer.chunks[-1].output_layer.weight.data.copy_(value_head(shape.hidden))
        head = PolicyHead.of(actor.model, mesh, shape.vocab, segments=a.segments)
        if budget != budgets[0]:
            head = replace(head, chunk=5)  # rows: whole turns only
        own_T = logprobs(actor.model, head, batch(), packer, [every])
        given = batch()
        given = replace(given, old_logprob_T=own_T + given.old_logprob_T)
        loss = ActorLoss(given, minibatch_weights(given, every.chosen, a), a, head)
        step, ratios = actor_step(actor, loss, every, packer), Ratios(given, a)
        ratios.add(step.ratios)
        assert torch.equal(step.ratios.logprob_T, own_T)  # bitwise: the loss uses the scored policy
        value_R = values(critic.model, with_observations(given), packer, [every])
        numbers = step.metrics | ratios.row() | critic_step(critic, given, every, a.value_clip, packer)
        observing = critic_step(second, with_observations(given), every, a.value_clip, packer)
        numbers |= {f"observing {name}": value for name, value in observing.items()}
        results.append((numbers, own_T.tolist(), value_R.tolist()))
    layouts = training_layouts(shape, mesh.layout)
    weights = build.named_parameters(actor.chunks)
    export_hf(Path(out) / "weights", weights, layouts, shape, Path(model))
    if not distributed:
        gradients = {name: parameter.main_grad for name, parameter in weights.items()}
        export_hf(Path(out) / "gradients", gradients, layouts, shape, Path(model))
    return results
